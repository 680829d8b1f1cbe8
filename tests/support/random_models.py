"""Same bits: random models that mix everything a layer may do."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from tests.support.addresses import AddressedBuffer, Behind, ByAddress, ByAddressInPlace, Third, misplaced
from tests.support.odd_layers import (
    Apply,
    Attention,
    Block,
    Draws,
    Drift,
    Experts,
    Fork,
    Images,
    Join,
    LayerDrop,
    LowRank,
    Noise,
    OnFirst,
    Pop,
    Stash,
    StochasticDepth,
    TakesWhole,
    Unused,
    attention,
    half_frozen,
    recurrent,
)
from tests.support.plain_loop import weights_of
from tests.support.shared_weights import Place

KINDS: dict[str, Callable[[int], nn.Module]] = {
    "linear": lambda w: nn.Linear(w, w),
    "block": Block,
    "relu": lambda w: nn.ReLU(),
    "tanh": lambda w: nn.Tanh(),
    "gelu": lambda w: nn.GELU(),
    "layer norm": lambda w: nn.LayerNorm(w),
    "identity": lambda w: nn.Identity(),
    "turned": lambda w: Apply(lambda x: x.t().contiguous().t()),
    "in place": lambda w: nn.ReLU(inplace=True),
    "dropout in place": lambda w: nn.Dropout(0.3, inplace=True),
    "dropout": lambda w: nn.Dropout(0.3),
    "alpha dropout": lambda w: nn.AlphaDropout(0.3),
    "feature dropout": lambda w: nn.Sequential(nn.Unflatten(1, (w, 1)), nn.Dropout1d(0.3), nn.Flatten()),
    "feature alpha dropout": lambda w: nn.Sequential(
        nn.Unflatten(1, (w, 1)), nn.FeatureAlphaDropout(0.3), nn.Flatten()
    ),
    "rrelu": lambda w: nn.RReLU(),
    "noise": lambda w: Noise(),
    "draws": lambda w: Draws(),
    "stochastic depth": StochasticDepth,
    "layer drop": LayerDrop,
    "attention": Attention,
    "multihead attention": attention,
    "lstm": lambda w: recurrent(w, nn.LSTM),
    "gru": lambda w: recurrent(w, nn.GRU),
    "images": lambda w: Images(w, norm=False),
    "spectral norm": lambda w: spectral_norm(nn.Linear(w, w)),
    "weight norm": lambda w: weight_norm(nn.Linear(w, w)),
    "drift in place": lambda w: Drift(w, in_place=True),
    "drift by assignment": lambda w: Drift(w, in_place=False),
    "frozen": lambda w: nn.Linear(w, w).requires_grad_(False),
    "half frozen": half_frozen,
    "low rank": LowRank,
    "experts": Experts,
    "unused": lambda w: Unused(),
    "by address": lambda w: ByAddress(),
    "by address, again": lambda w: ByAddress(),
    "by address in place": lambda w: ByAddressInPlace(),
    "third": Third,
    "behind": Behind,
    "buffer by address": AddressedBuffer,
    "misplaced": lambda w: misplaced(nn.Linear(w, w)),
    "batch norm": lambda w: nn.BatchNorm1d(w),
    "batch norm, cumulative": lambda w: nn.BatchNorm1d(w, momentum=None),
    "batch norm of images": lambda w: Images(w, norm=True),
    "batch norm, frozen": lambda w: nn.BatchNorm1d(w).requires_grad_(False),
    "batch norm, no statistics": lambda w: nn.BatchNorm1d(w, track_running_stats=False),
}
SAME, OTHER = ("skip", "same", "keyed", "turned"), ("skip", "same", "keyed", "turned", "chunks")  # ways to fork
ADDRESSES = ("by address", "by address", "by address in place", "third", "behind", "buffer by address", "misplaced")
SPOILED = {"relu", "tanh", "sigmoid", "turned", "every second", "in place", "rrelu", "noise", "draws"}
"""A backward needs what these give."""
KEEPING = {"identity", "unused", "dropout", "dropout in place"}  # may give the very tensor that they are given
UNSURE = {"layer drop", "unused"}  # some micro-batch may train nothing in them
WIDTHS = (1, 2, 3, 5, 7, 8, 9, 33)


def linear_to(draw: Random, width: int, out: int) -> nn.Module:
    return nn.Linear(width, out, bias=draw.random() < 0.8)


RESHAPING: dict[str, Callable[[Random, int, int], nn.Module]] = {
    "linear to another width": linear_to,
    "frozen to another width": lambda draw, w, out: linear_to(draw, w, out).requires_grad_(False),
    "spectral norm to another width": lambda draw, w, out: spectral_norm(nn.Linear(w, out)),
    "every second": lambda draw, w, out: Apply(lambda x: x[:, ::2]),
    "sigmoid": lambda draw, w, out: nn.Sigmoid(),
}
"""Layers for models whose width changes: from a width to another, but for the last two."""


@dataclass(frozen=True)
class Knobs:
    """What a model may be like."""

    layers: tuple[int, int]  # at least and at most, before its ends are brought together
    reshapes: bool  # layers may change the width, and the model may end with several values
    norms: bool  # it may have BatchNorms, for which a micro-batch needs two rows
    shares: bool  # modules and parameters may be used twice, and a table be taken whole

    def kinds(self) -> list[str]:
        """What a layer may be, as often as it is to be chosen."""
        kept = [kind for kind in KINDS if self.norms or not kind.startswith("batch norm")]
        return [*kept, *3 * [*RESHAPING], *ADDRESSES] if self.reshapes else kept


@dataclass
class Model:
    layers: list[nn.Module]
    width: int  # of what it is given
    kinds: list[str]
    whole: bool = False
    ties: list[tuple[str, ...]] = field(default_factory=list)

    @property
    def norms(self) -> bool:
        """Whether it has a BatchNorm, so that a micro-batch needs two rows."""
        return any(isinstance(m, _BatchNorm) for layer in self.layers for m in layer.modules())

    def cuts(self) -> list[int]:
        """Where it may be cut: not between two uses of a module that keeps state."""
        allowed = set(range(1, len(self.layers)))
        uses: dict[nn.Module, list[int]] = {}
        for index, layer in enumerate(self.layers):
            for module in layer.modules():
                if module._buffers:
                    uses.setdefault(module, []).append(index)
        for places in uses.values():
            allowed -= set(range(places[0] + 1, places[-1] + 1))
        return sorted(allowed)


@dataclass
class End:
    """The end of a model as it grows: what the next layer is given."""

    width: int
    side: int | None = None  # width of the second value, if there are two
    spare: bool = True  # whether no backward needs it, so that the next layer may work in place
    stashed: dict[str, int] = field(default_factory=dict)  # the width of what was kept under each name
    popped: set[str] = field(default_factory=set)
    repeatable: list[tuple[int, str, nn.Module]] = field(default_factory=list)

    def pass_by(self, kind: str) -> None:
        """Moves behind a layer of one value."""
        self.spare = kind not in SPOILED and (self.spare or kind not in KEEPING)


def generate(draw: Random, knobs: Knobs, end: End) -> Model:
    """A model that begins where `end` is."""
    with weights_of(draw.randrange(2**31)):
        model = Model([], end.width, [])
        if knobs.shares and draw.random() < 0.15:
            model.whole = True
            _add(model, "whole", TakesWhole(end.width))
        _grow(draw, model, end, knobs)
        pairs = zip(model.kinds, model.layers, strict=True)
        sure = [layer for kind, layer in pairs if kind.removeprefix("again: ") not in UNSURE]
        if not any(p.requires_grad for layer in sure for p in layer.parameters()):
            last = nn.Linear(end.width, end.width)
            _add(model, "linear", last if end.side is None else OnFirst(last))
        if knobs.shares and draw.random() < 0.4:
            _share(draw, model)
    return model


def _add(model: Model, kind: str, layer: nn.Module) -> None:
    model.layers.append(layer)
    model.kinds.append(kind)


def _grow(draw: Random, model: Model, end: End, knobs: Knobs) -> None:
    layers = draw.randint(*knobs.layers)
    while len(model.layers) < layers:
        dice = draw.random()
        again = [(kind, layer) for width, kind, layer in end.repeatable if knobs.shares and width == end.width]
        if end.side is not None:
            if dice < 0.5:
                _join(draw, model, end, knobs)
            else:
                _add_any(draw, model, end, knobs)
        elif dice < 0.1:
            _fork(draw, model, end, knobs)
        elif dice < 0.2:
            name = f"e{len(end.stashed)}"
            end.stashed[name] = end.width
            _add(model, "stash", Stash(name, end.width))
            end.spare = True
        elif end.stashed and dice < 0.35:
            _pop(model, end, draw.sample(sorted(end.stashed), draw.randint(1, len(end.stashed))))
        elif again and dice < 0.45:
            kind, layer = draw.choice(again)
            _add(model, f"again: {kind}", layer)
            end.pass_by(kind)
        else:
            _add_any(draw, model, end, knobs)
    waiting = sorted(set(end.stashed) - end.popped)
    if end.side is not None and (waiting or not knobs.reshapes or draw.random() < 0.5):
        _join(draw, model, end, knobs)
    if waiting:
        _pop(model, end, waiting)


def _fork(draw: Random, model: Model, end: End, knobs: Knobs) -> None:
    kind = draw.choice(OTHER if knobs.reshapes and end.width > 1 else SAME)
    _add(model, f"fork, {kind}", Fork(kind, end.width))
    end.side = {"chunks": end.width // 2, "turned": (end.width + 1) // 2}.get(kind, end.width)
    end.width -= end.side if kind == "chunks" else 0
    end.spare = kind in ("skip", "keyed")


def _join(draw: Random, model: Model, end: End, knobs: Knobs) -> None:
    assert end.side is not None
    out = draw.randint(1, 9) if knobs.reshapes else end.width
    _add(model, "join", Join(end.width, end.side, out))
    end.width, end.side, end.spare = out, None, True


def _pop(model: Model, end: End, names: Sequence[str]) -> None:
    end.popped |= set(names)
    _add(model, "pop", Pop({name: end.stashed[name] for name in names}, end.width))
    end.spare = True


def _add_any(draw: Random, model: Model, end: End, knobs: Knobs) -> None:
    allowed = [kind for kind in knobs.kinds() if end.spare or not kind.endswith("in place") or "drift" in kind]
    kind = draw.choice(allowed)
    width = end.width
    if kind in RESHAPING:
        end.width = {"every second": (width + 1) // 2, "sigmoid": width}.get(kind) or draw.choice(WIDTHS)
        layer = RESHAPING[kind](draw, width, end.width)
    else:
        layer = KINDS[kind](width)
        if end.side is None and not kind.endswith("in place"):
            end.repeatable.append((width, kind, layer))
    _add(model, kind, layer if end.side is None else OnFirst(layer))
    end.pass_by(kind)


def _share(draw: Random, model: Model) -> None:
    """Makes two or three parameters of one shape in different layers one, by identity or by `ties`."""
    groups = [group for group in _of_one_shape(model) if len({index for index, _, _ in group}) > 1]
    if not groups:
        return
    group = draw.choice(groups)
    chosen = draw.sample(group, min(len(group), draw.choice([2, 2, 3])))
    chosen.sort(key=lambda item: item[0])
    if draw.random() < 0.5:
        model.ties.append(tuple(name for _, name, _ in chosen))
        model.kinds.append("tied")
    else:
        first = nn.Sequential(*model.layers).get_parameter(chosen[0][1])
        for _, _, (module, name) in chosen[1:]:
            module._parameters[name] = first
        model.kinds.append("shared")


def _of_one_shape(model: Model) -> list[list[tuple[int, str, Place]]]:
    """The parameters that could be one: their layers, names and places."""
    by_shape: dict[object, list[tuple[int, str, Place]]] = {}
    seen: set[nn.Module] = set()
    for index, layer in enumerate(model.layers):
        for path, module in layer.named_modules(prefix=str(index)):
            if module in seen:
                continue
            seen.add(module)
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    key = (tuple(parameter.shape), parameter.requires_grad)
                    by_shape.setdefault(key, []).append((index, f"{path}.{name}", (module, name)))
    return list(by_shape.values())
