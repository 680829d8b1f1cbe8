"""Models with forwards of their own, as people write them: what stands between their blocks is what they are for."""

import math
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe
from tests.support.beside_plain import Case

W = 6  # width
N = 4  # words of a row
VOCABULARY = 13


def drawn(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def words(rows: int, length: int = N, seed: int = 4) -> Tensor:
    return torch.randint(1, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def vectors(rows: int) -> Tensor:
    return drawn(rows, W)


def sequences(rows: int) -> Tensor:
    return drawn(rows, N, W)


def targets(rows: int) -> Tensor:
    return drawn(rows, W, seed=8)


def pictures(rows: int) -> Tensor:
    return drawn(rows, 2, 8)


def times(rows: int) -> Tensor:
    return words(rows, 1)[:, 0] % 10


def target_words(rows: int) -> Tensor:
    return drawn(rows, N, W, seed=8)


class Block(nn.Module):
    def __init__(self, width: int = W, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.inner(self.norm(x))))


def blocks(count: int = 5, **given: Any) -> nn.ModuleList:
    return nn.ModuleList(Block(**given) for _ in range(count))


class Layered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = blocks()


class Graph(Layered):
    """Message passing: nodes, edges among them, and weights of the edges, which every block uses."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(W, W)
        self.head = nn.Linear(W, W)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        source, target = edge_index
        h = self.encode(x)
        for layer in self.layers:
            message = layer(h)[source]
            if edge_weight is not None:
                message = message * edge_weight[:, None]
            h = h + torch.zeros_like(h).index_add(0, target, message)
        return self.head(h)


class UNet(nn.Module):
    """Down, up, skips by a list that is popped, an embedding of a time, and BatchNorms between blocks."""

    def __init__(self, affine: bool = True) -> None:
        super().__init__()
        self.time = nn.Embedding(10, 4)
        self.down = nn.ModuleList([nn.Conv1d(2, 4, 3, padding=1), nn.Conv1d(4, 4, 3, padding=1)])
        self.norms = nn.ModuleList([nn.BatchNorm1d(4, affine=affine), nn.BatchNorm1d(4, affine=affine)])
        self.up = nn.ModuleList([nn.Conv1d(8, 4, 3, padding=1), nn.Conv1d(8, 2, 3, padding=1)])

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        embedded = self.time(t)[:, :, None]
        skips = []
        for conv, norm in zip(self.down, self.norms, strict=True):
            x = F.relu(norm(conv(x)) + embedded, inplace=True)
            skips.append(x)
        for conv in self.up:
            x = conv(torch.cat([x, skips.pop()], dim=1))
        return x


class Collections(nn.Module):
    """Lists of lists, a ModuleDict, blocks that are chosen by keys, and some that are called several times."""

    def __init__(self) -> None:
        super().__init__()
        self.groups = nn.ModuleList([blocks(2), blocks(3)])
        self.parts = nn.ModuleDict({f"part_{at}": Block() for at in range(2)})
        self.extra = nn.ModuleDict({"head": nn.Linear(W, W)})

    def forward(self, x: Tensor) -> Tensor:
        for group in self.groups.children():
            before = x
            for layer in group.children():
                x = layer(x)
            x = x + before
        for _ in range(3):
            for part in self.parts.values():
                x = part(x)
        return self.extra["head"](x)


class Tied(Layered):
    """The head is the embedding, as open code."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, W)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.linear(x, self.embed.weight)


class RawParameters(Layered):
    """Parameters that stand between blocks: one for each, one for all, one for a token, one for places."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(5, W))
        self.gains = nn.ParameterDict({"all": torch.ones(W)})
        self.shifts = nn.ParameterList(torch.randn(W) for _ in range(5))
        self.mask_token = nn.Parameter(torch.randn(1, 1, W))
        self.positions = nn.Parameter(torch.randn(1, N, W))
        self.cls = nn.Parameter(torch.randn(1, 1, W))

    def forward(self, x: Tensor, masked: Tensor) -> Tensor:
        x = torch.where(masked[..., None], self.mask_token.expand(len(x), N, W), x) + self.positions
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], dim=1)
        for at, layer in enumerate(self.layers):
            x = layer(x) * self.scale[at] + self.shifts[at] * self.gains["all"]
        return x[:, 1:]


class Dropped(nn.Module):
    """Dropout between blocks, by function and by module, noise, and in blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = blocks(dropout=0.2)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(W, W)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(x)
        for layer in self.layers:
            x = F.dropout(layer(x), 0.1, self.training) + 0.01 * torch.randn_like(x)
            keep = x.new_empty(len(x), 1).bernoulli_(0.8)
            x = self.dropout(x * keep + torch.rand(W))
        return self.head(x)


class InPlace(Layered):
    """Residuals in place, by statements that give nothing back."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        for at, layer in enumerate(self.layers):
            made = layer(x)
            x = x + made if at == 0 else x.clone()
            x += made
            x.mul_(0.5)
            x[:, 0] = 0.25
            x.tanh_()
        return x


class WholeNumbers(Layered):
    """Branches on whole numbers, masks and positions made of them, counts of words."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, W)
        self.places = nn.Embedding(N, W)

    def forward(self, ids: Tensor, lengths: Tensor, often: int = 2) -> Tensor:
        x = self.embed(ids) + self.places(torch.arange(ids.shape[1]))
        mask = (torch.arange(ids.shape[1]) < lengths[:, None])[..., None].float()
        factor = 0.5 if int(ids.max()) > 5 else 2.0
        for at, layer in enumerate(self.layers):
            x = layer(x) * mask
            x = x * (factor if bool((ids[:, 0] > at).any()) else 3.0)
        return x * often


class Box(NamedTuple):
    x: Tensor
    at: int


@dataclass
class Carry:
    x: Tensor
    at: int
    history: list[Tensor]
    nothing: None = None


class Odd(nn.Module):
    """A block that takes and gives containers: of a kind of its own each."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.inner = Block()

    def forward(self, x: Any) -> Any:
        match self.kind:
            case "dict":
                return {"x": self.inner(x), "at": 3, "none": None}
            case "tuple":
                return self.inner(x), (x, 2), None
            case "named":
                return Box(self.inner(x), 2)
            case "dataclass":
                return Carry(self.inner(x), 2, [x, x * 2])
            case _:
                return None


class Containers(nn.Module):
    """Blocks that return dicts, tuples, dataclasses and nothing; whole numbers come out of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Odd(kind) for kind in ("dict", "tuple", "named", "dataclass"))
        self.head = Block()

    def forward(self, x: Tensor) -> Any:
        one = self.layers[0](x)
        two, (three, count), nothing = self.layers[1](one["x"] * one["at"])
        assert nothing is None
        assert one["none"] is None
        box = self.layers[2](two + three * count)
        carry = self.layers[3](box.x * box.at)
        y = self.head(carry.x + carry.history[1] * carry.at)
        return {"y": y, "more": (carry, count), "none": carry.nothing}


FOUND: ContextVar[dict[str, list[Tensor]] | None] = ContextVar("FOUND", default=None)


def find_states(block: nn.Module, given: tuple[Tensor], made: Tensor) -> None:
    if (found := FOUND.get()) is not None:
        found["states"] += [] if found["states"] else [given[0]]
        found["states"].append(made)


def find_insides(inner: nn.Module, given: tuple[Tensor], made: Tensor) -> None:
    if (found := FOUND.get()) is not None:
        found["insides"].append(made)


class Found(Layered):
    """Hooks in blocks add to lists that the forward opens: what they are given and return, and what is inside."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(W, W)
        for layer in self.layers:
            layer.register_forward_hook(find_states)
            layer.get_submodule("inner").register_forward_hook(find_insides)

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.encode(x)
        token = FOUND.set({"states": [], "insides": []})
        for layer in self.layers:
            x = layer(x) + 0.3 * first
        found = FOUND.get()
        FOUND.reset(token)
        assert found is not None
        assert found["states"][0] is first
        weighed = sum(state / (2 + at) for at, state in enumerate(found["states"]))
        return x + weighed * 0.7 + torch.stack(found["insides"]).mean(0) + found["states"][0].sin()


class RowByRow(Layered):
    """Takes rows apart between blocks, as many as there are."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.stack(list(layer(x)))
        return x


class OneDict(Layered):
    """Takes the whole batch as one dict, and gives its own loss."""

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        x = batch["x"]
        for layer in self.layers:
            x = layer(x)
        return {"loss": F.mse_loss(x, batch["y"]), "x": x}


class Late(Layered):
    """Values of inputs that are used late: a condition, and weights of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.condition = nn.Linear(W, W)

    def forward(self, x: Tensor, c: Tensor, w: Tensor) -> Tensor:
        first = x
        for at, layer in enumerate(self.layers):
            x = layer(x)
            if at in (1, 3):
                x = x + c
        return self.condition(c + x) * w[:, None] + first


class Constants(Layered):
    """Blocks that are not trained, and between blocks a parameter and buffers that are not; BatchNorms."""

    def __init__(self) -> None:
        super().__init__()
        for at in (0, 1, 3):
            self.layers[at].requires_grad_(False)
        self.bias = nn.Parameter(torch.randn(W), requires_grad=False)
        self.mean = nn.Buffer(torch.randn(W))
        self.std = nn.Buffer(torch.rand(W), persistent=False)
        self.norm = nn.BatchNorm1d(W)
        self.plain = nn.BatchNorm1d(W, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        x = (x - self.mean) / self.std
        for layer in self.layers:
            x = layer(x) + self.bias + self.mean
        return self.plain(self.norm(x)) * self.std


class Varying(nn.Module):
    """Blocks return a number, and a tensor or None, which differ by micro-batch. The forward marks each tensor."""

    class Block(Block):
        def forward(self, x: Tensor, kind: Tensor, extra: Tensor | None) -> tuple[Tensor, float, Tensor | None]:  # type: ignore[override]
            made = super().forward(x if extra is None else x + extra)
            return made, (0.0, -0.0, True, 1)[int(kind[0])], None if kind[0] % 2 else made * 2

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Block() for _ in range(5))

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        extra: Tensor | None = None
        factor = 1.0
        for layer in self.layers:
            x, number, following = layer(x, kind, extra)
            assert not hasattr(x, "marked")
            x.marked = True  # type: ignore[attr-defined]
            extra = following if extra is None else extra
            factor *= math.copysign(1.25 if type(number) is bool else 1.5, number)
        return x * factor


class Positions(nn.Module):
    """Registers a table in the first forward, and again where one is too short."""

    def forward(self, x: Tensor) -> Tensor:
        table = getattr(self, "table", None)
        if table is None or len(table) < x.shape[1]:
            table = torch.arange(x.shape[1], dtype=x.dtype, device=x.device)[:, None].sin()
            self.register_buffer("table", table)
        found: Tensor = table[: x.shape[1]]
        return found


class Registers(Layered):
    """Blocks, and a module without parameters that registers a buffer; used in the first block alone, or in all."""

    def __init__(self, *, all_blocks: bool) -> None:
        super().__init__()
        self.positions, self.all_blocks = Positions(), all_blocks

    def forward(self, x: Tensor) -> Tensor:
        for at, layer in enumerate(self.layers):
            x = layer(x + self.positions(x) if self.all_blocks or not at else x)
        return x


class OtherMethods(Layered):
    """Modules that are used by other methods than a call."""

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(W, W))
            self.inner = nn.Linear(W, W)

        def project(self, x: Tensor) -> Tensor:
            return self.inner(x @ self.weight)

        def score(self, x: Tensor) -> Tensor:
            return x @ self.weight.t()

        def forward(self, x: Tensor) -> Tensor:
            raise AssertionError("nobody calls this")

    def __init__(self) -> None:
        super().__init__()
        self.head = OtherMethods.Head()
        self.embed = nn.Linear(W, W)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed.forward(x)
        for layer in self.layers:
            x = layer(x)
        return self.head.score(self.head.project(x))


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, W)
        self.core = nn.Transformer(W, 2, 2, 2, 12, dropout=0.1, batch_first=True)
        self.head = nn.Linear(W, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        future = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        padded = source == 1
        mixed = self.core(
            self.embed(source), self.embed(target), tgt_mask=future, tgt_is_causal=True,
            src_key_padding_mask=padded.float().masked_fill(padded, float("-inf")),
        )  # fmt: skip
        return self.head(mixed)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(W, 2, 12, dropout=0.1, batch_first=True, norm_first=True)
        self.core = nn.TransformerEncoder(layer, 4, norm=nn.LayerNorm(W), enable_nested_tensor=False)

    def forward(self, x: Tensor, padded: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.core(x, mask=mask, src_key_padding_mask=torch.zeros_like(padded).float())


def graph_parts(rows: int) -> Any:
    found = []
    for seed, count in enumerate((5, 3, 6)):
        edges = torch.randint(count, (2, 8), generator=torch.Generator().manual_seed(seed))
        found.append({"x": drawn(count, W, seed=seed), "edge_index": edges, "edge_weight": drawn(8, seed=seed + 9)})
    return gpipe.MicroBatches(found)


def graph_targets(rows: int) -> Any:
    return gpipe.MicroBatches([drawn(count, W, seed=20 + count) for count in (5, 3, 6)])


def whole_graph(rows: int) -> Any:
    """Rows that are alike: nodes of graphs that have the same few edges, among the first two."""
    edges = torch.tensor([[0, 1, 1], [1, 0, 1]])
    return {"x": vectors(rows), "edge_index": gpipe.Whole(edges)}


def pairs(**parts: Callable[[int], Tensor]) -> Callable[[int], dict[str, Tensor]]:
    return lambda rows: {name: part(rows) for name, part in parts.items()}


def word_targets(rows: int) -> Tensor:
    return words(rows, seed=9)


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


CASES: dict[str, Case] = {
    "graph, ready-made": Case(Graph, graph_parts, graph_targets),
    "graph, whole": Case(Graph, whole_graph, targets),
    "unet": Case(UNet, pairs(x=pictures, t=times), pictures),
    "unet, not affine": Case(lambda: UNet(affine=False), pairs(x=pictures, t=times), pictures),
    "collections": Case(Collections, vectors, targets),
    "blocks by name": Case(Collections, vectors, targets, blocks=[f"parts.part_{at}" for at in range(2)]),
    "tied": Case(Tied, words, word_targets, cross_entropy),
    "raw parameters": Case(
        RawParameters, pairs(x=sequences, masked=lambda r: words(r) > 6), target_words
    ),
    "dropped": Case(Dropped, vectors, targets),
    "in place": Case(InPlace, vectors, targets),
    "whole numbers": Case(WholeNumbers, pairs(ids=words, lengths=lambda r: words(r, 1)[:, 0] % N + 1), target_words),
    "containers": Case(Containers, vectors, targets),
    "found by hooks": Case(Found, vectors, targets),
    "row by row": Case(RowByRow, vectors, targets),
    "one dict": Case(OneDict, pairs(x=vectors, y=targets), None, None),
    "late": Case(Late, pairs(x=vectors, c=targets, w=lambda r: drawn(r)), targets),
    "constants": Case(Constants, vectors, targets),
    "varying": Case(Varying, pairs(x=vectors, kind=lambda rows: torch.arange(rows) // 2), targets),
    "registers a buffer": Case(lambda: Registers(all_blocks=False), sequences, target_words),
    "registers a buffer for all": Case(lambda: Registers(all_blocks=True), sequences, target_words),
    "other methods": Case(OtherMethods, vectors, targets),
    "translator": Case(Translator, pairs(source=words, target=word_targets), word_targets, cross_entropy),
    "encoder": Case(Encoder, pairs(x=sequences, padded=lambda r: words(r) < 0), target_words),
}  # fmt: skip
