import pytest
import torch
from torch import Tensor, nn

from gpipe.models import unet


def run(layers: list[nn.Module], x: Tensor) -> Tensor:
    """The layers in turn, without a pipeline: what a layer stashes waits for those that pop it."""
    stashed: dict[str, Tensor] = {}
    for layer in layers:
        popped = {name: stashed[name] for name in getattr(layer, "pop", ())}
        x = layer(x, **popped)
        if hasattr(layer, "stash"):
            x, kept = x
            assert tuple(kept) == layer.stash
            stashed |= kept
    return x


def test_counts_of_layers_and_parameters() -> None:
    for b, c, layers, count in (
        (5, 64, 241, 232_687_328),
        (6, 72, 285, 362_157_516),
        (11, 128, 505, 2_213_834_176),
        (24, 128, 1077, 4_993_859_008),
        (24, 160, 1077, 7_802_903_600),
        (48, 160, 2133, 15_822_206_000),
    ):
        with torch.device("meta"):
            network = unet(b, c)
        assert len(network) == layers == 44 * b + 21
        assert sum(p.numel() for layer in network for p in layer.parameters()) == count


@pytest.mark.parametrize("b", [1, 2])
@pytest.mark.parametrize(("height", "width"), [(64, 64), (65, 94)])
def test_the_output_is_as_large_as_the_image(b: int, height: int, width: int) -> None:
    with torch.device("meta"):
        logits = run(unet(b, 4, outputs=2), torch.empty(3, 3, height, width))
    assert logits.shape == (3, 2, height, width)


def test_every_parameter_learns() -> None:
    torch.manual_seed(0)
    network = unet(1, 2)
    run(network, torch.randn(2, 3, 64, 64)).square().sum().backward()
    parameters = nn.Sequential(*network).named_parameters()
    assert [name for name, p in parameters if p.grad is None or not p.grad.any()] == []


def test_impossible_sizes_are_refused() -> None:
    for b, c in ((0, 4), (1, 3), (1, 0)):
        with pytest.raises(ValueError, match=f"b={b}, c={c} are out of range"):
            unet(b, c)
