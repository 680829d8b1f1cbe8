"""The options of each recipe, by its name."""

from gpipe.recipes.options.images import DigitsOptions, ImagesOptions
from gpipe.recipes.options.training import TrainOptions
from gpipe.recipes.options.translation import TranslationOptions

OPTIONS: dict[str, type[TrainOptions]] = {
    "digits": DigitsOptions,
    "images": ImagesOptions,
    "translation": TranslationOptions,
}
