"""Models drawn at random, with lists of modules inside of blocks, beside them and around them.

Each says the names of its `outer` blocks: those between which somebody who knows it would cut it.
"""

import random
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

W = 6
IDS = 5  # of tokens, by which some mixtures choose


def listed(modules: Sequence[nn.Module], kind: str) -> nn.Module:
    if kind == "names":
        return nn.ModuleDict({f"m{at}": one for at, one in enumerate(modules)})
    return nn.Sequential(*modules) if kind == "sequence" else nn.ModuleList(modules)


def members(some: nn.Module) -> list[nn.Module]:
    return list(some.children())


def list_kind(draw: random.Random) -> str:
    return draw.choice(["list", "list", "names", "sequence"])


def feed_forward(draw: random.Random) -> nn.Module:
    if draw.random() < 0.5:
        return nn.Linear(W, W)
    return nn.Sequential(nn.Linear(W, W), nn.Tanh(), nn.Linear(W, W))


Rows = Iterator[tuple[int, Tensor, Tensor | float]]
"""An expert's number, the rows that it gets, and their weights."""


def by_where(gates: Tensor, ids: Tensor, top: int) -> Rows:
    weights, chosen = gates.topk(top, -1)
    for at in range(gates.shape[-1]):
        rows, places = torch.where(chosen == at)
        if len(rows):
            yield at, rows, weights[rows, places, None]


def by_one_hot(gates: Tensor, ids: Tensor, top: int) -> Rows:
    weights, chosen = gates.topk(top, -1)
    mask = one_hot(chosen, gates.shape[-1]).permute(2, 1, 0)
    for hit in torch.greater(mask.sum((-1, -2)), 0).nonzero():
        places, rows = torch.where(mask[hit[0]])
        yield int(hit[0]), rows, weights[rows, places, None]


def by_counts(gates: Tensor, ids: Tensor, top: int) -> Rows:
    weights, chosen = gates.topk(top, -1)
    order = chosen.flatten().argsort(stable=True)
    start = 0
    for at, count in enumerate(chosen.flatten().bincount(minlength=gates.shape[-1]).tolist()):
        if count:
            picked = order[start : start + count]
            yield at, picked // top, weights.flatten()[picked, None]
        start += count


def by_numpy(gates: Tensor, ids: Tensor, top: int) -> Rows:
    chosen = gates.detach().argmax(-1).cpu().numpy()
    for at in sorted(set(chosen.tolist())):
        rows = torch.from_numpy((chosen == at).nonzero()[0]).to(gates.device)
        yield at, rows, gates[rows, at, None]


def by_ids(gates: Tensor, ids: Tensor, top: int) -> Rows:
    for at in range(gates.shape[-1]):
        rows = (ids % gates.shape[-1] == at).nonzero()[:, 0]
        if len(rows):
            yield at, rows, 1.0


def by_any_id(gates: Tensor, ids: Tensor, top: int) -> Rows:
    for at in range(gates.shape[-1]):
        mask = ids % gates.shape[-1] == at
        if mask.any():
            yield at, mask.nonzero()[:, 0], gates[mask][:, at, None]


def by_expert(gates: Tensor, ids: Tensor, top: int) -> Rows:
    """The experts choose their rows, as many each."""
    for at in range(gates.shape[-1]):
        weights, rows = gates[:, at].topk(min(top, len(gates)))
        yield at, rows, weights[:, None]


def densely(gates: Tensor, ids: Tensor, top: int) -> Rows:
    every = torch.arange(len(gates), device=gates.device)
    for at in range(gates.shape[-1]):
        yield at, every, gates[:, at, None]


ROUTES: dict[str, Callable[[Tensor, Tensor, int], Rows]] = {
    "where": by_where,
    "one_hot": by_one_hot,
    "counts": by_counts,
    "numpy": by_numpy,
    "ids": by_ids,
    "any id": by_any_id,
    "expert": by_expert,
    "dense": densely,
}


class Experts(nn.Module):
    """Each row goes through the experts that a gate chooses for it; one that no row chose does not run."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        count = draw.randint(2, 6)
        self.top = draw.randint(1, 2)
        self.route = draw.choice([*ROUTES])
        self.warm = draw.choice([0, 0, 0, 3])  # calls until it chooses at all
        self.calls = nn.Buffer(torch.zeros((), dtype=torch.int64))
        self.gate: nn.Module | None = nn.Linear(W, count)
        if draw.random() < 0.3:
            self.gate, self.by = None, nn.Parameter(torch.randn(W, count))
        self.grouped = draw.random() < 0.2
        experts = [feed_forward(draw) for _ in range(count)]
        if self.grouped:  # a list of lists
            self.experts = listed([listed(experts[:1], "list"), listed(experts[1:], list_kind(draw))], "list")
        else:
            self.experts = listed(experts, list_kind(draw))
        shared = draw.choice([0, 0, 1, 2])
        self.shared = listed([feed_forward(draw) for _ in range(shared)], "list") if shared else None

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        experts = members(self.experts)
        if self.grouped:
            experts = [one for group in experts for one in members(group)]
        gates = (x @ self.by if self.gate is None else self.gate(x)).softmax(-1)
        route = self.route
        if self.warm:
            if self.training:
                self.calls.add_(1)
            route = "dense" if self.calls <= self.warm else route
        out = x
        for at, rows, weights in ROUTES[route](gates, ids, self.top):
            out = out.index_add(0, rows, experts[at](x[rows]) * weights)
        for one in members(self.shared) if self.shared is not None else ():
            out = out + one(x)
        return out


class Heads(nn.Module):
    """All heads run on the same, and a buffer may count how often."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.heads = listed([nn.Linear(W, W) for _ in range(draw.randint(2, 5))], list_kind(draw))
        self.norm = nn.LayerNorm(W)
        self.count = nn.Buffer(torch.zeros(())) if draw.random() < 0.5 else None

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        if self.count is not None:
            self.count.add_(1)
        made: Tensor = self.norm(torch.stack([x, *(head(x) for head in members(self.heads))]).sum(0))
        return made


class Branches(nn.Module):
    """One of several branches runs, as a value says."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.branches = listed([feed_forward(draw) for _ in range(draw.randint(2, 4))], list_kind(draw))
        self.by_ids = draw.random() < 0.3

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        some = members(self.branches)
        first = int(ids.sum()) % 2 == 0 if self.by_ids else bool(x.mean() > 0)
        branch: nn.Module = some[0] if first else some[-1]
        return x + branch(x)


class Drops(nn.Module):
    """Works on a part of the rows, whose number depends on values, with inner lists."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.score = nn.Linear(W, 1)
        self.steps = listed([feed_forward(draw) for _ in range(draw.randint(2, 3))], list_kind(draw))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        rows = (self.score(x)[:, 0] > 0).nonzero()[:, 0]
        some = x[rows]
        for step in members(self.steps):
            some = some + step(some)
        return x.index_add(0, rows, some)


class Layer(nn.Module):
    """Norm, mixing of features and a mixture or another module with a list, as in a transformer."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(W), nn.Linear(W, W)
        self.mlp = draw.choice([Experts, Experts, Dense, Heads])(draw)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        x = x + self.mix(self.norm(x)).tanh()
        made: Tensor = self.mlp(x, ids)
        return made


class Dense(nn.Module):
    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.net = feed_forward(draw)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        made: Tensor = x + self.net(x)
        return made


KINDS: list[Callable[[random.Random], nn.Module]] = [Experts, Experts, Layer, Layer, Heads, Branches, Drops, Dense]


def some_blocks(draw: random.Random, least: int = 2) -> list[nn.Module]:
    kinds = draw.choices(KINDS, k=1 if draw.random() < 0.6 else 3)
    return [draw.choice(kinds)(draw) for _ in range(draw.randint(least, 4))]


def blocks_listed(draw: random.Random, least: int = 2) -> nn.Module:
    kind = list_kind(draw)
    blocks = some_blocks(draw, least)
    return listed(blocks, kind)


class Tower(nn.Module):
    """Blocks, one after another; perhaps in groups of a list each."""

    def __init__(self, draw: random.Random, least: int = 2) -> None:
        super().__init__()
        self.groups = draw.choice([0, 0, 0, 2, 3])
        if self.groups:
            groups = [blocks_listed(draw, 1) for _ in range(self.groups)]
            self.blocks = listed(groups, draw.choice(["list", "names"]))
        else:
            self.blocks = blocks_listed(draw, least)

    def outer(self) -> list[str]:
        names = [name for name, _ in self.blocks.named_children()]
        if self.groups:
            groups = self.blocks.named_children()
            names = [f"{name}.{inner}" for name, group in groups for inner, _ in group.named_children()]
        return [f"blocks.{name}" for name in names]

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        for block in members(self.blocks):
            for one in members(block) if self.groups else [block]:
                x = one(x, ids)
        return x


class Drawn(nn.Module):
    """What all drawn models have: an embedding of rows and tokens, and one or several heads."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.named = draw.random() < 0.3  # embeddings by names, as for tables
        if self.named:
            self.embed: nn.Module = nn.ModuleDict({"rows": nn.Linear(W, W), "words": nn.Embedding(IDS, W)})
        else:
            self.embed = nn.Linear(W, W)
        self.kind_of_head = draw.choice(["linear", "linear", "mixture", "heads", "sequence"])
        match self.kind_of_head:
            case "linear":
                self.head: nn.Module = nn.Linear(W, W)
            case "mixture":
                self.head = Experts(draw)
            case "heads":
                self.head = nn.ModuleList([nn.Linear(W, 3), nn.Linear(W, 3)])
            case _:
                self.head = nn.Sequential(nn.Linear(W, W), nn.Tanh(), nn.Linear(W, W))

    @property
    def outer(self) -> list[str]:
        raise NotImplementedError

    def embedded(self, x: Tensor, ids: Tensor) -> Tensor:
        made: Tensor
        if isinstance(self.embed, nn.ModuleDict):
            made = self.embed["rows"](x) + self.embed["words"](ids)
        else:
            made = self.embed(x)
        return made

    def ended(self, x: Tensor, ids: Tensor) -> Tensor:
        made: Tensor
        match self.kind_of_head:
            case "mixture":
                made = self.head(x, ids)
            case "heads":
                made = torch.cat([one(x) for one in members(self.head)], -1)
            case _:
                made = self.head(x)
        return made


class Flat(Drawn):
    """Blocks in the model itself, or in a part of it."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__(draw)
        self.body = Tower(draw)

    @property
    def outer(self) -> list[str]:
        return [f"body.{name}" for name in self.body.outer()]

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.ended(self.body(self.embedded(x, ids), ids), ids)


class Towers(Drawn):
    """Two or three towers on the same, or one behind another, and what joins them."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__(draw)
        towers = [Tower(draw) for _ in range(draw.randint(2, 3))]
        self.towers, self.behind = listed(towers, draw.choice(["list", "names"])), draw.random() < 0.4
        self.join = draw.choice([Dense, Experts, Branches])(draw)

    @property
    def outer(self) -> list[str]:
        some = self.towers.named_children()
        return [f"towers.{name}.{one}" for name, tower in some for one in tower.outer()]  # type: ignore[operator]

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        x = self.embedded(x, ids)
        first = x
        for tower in members(self.towers):
            x = tower(x, ids) if self.behind else x + tower(first, ids)
        return self.ended(self.join(x, ids), ids)


class EncoderDecoder(Drawn):
    """Two towers by attributes; the second is given what the first made, again before each of its parts."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__(draw)
        self.encoder, self.decoder = Tower(draw), Tower(draw)
        self.bridges = listed([nn.Linear(W, W) for _ in range(2)], list_kind(draw))

    @property
    def outer(self) -> list[str]:
        some = {"encoder": self.encoder, "decoder": self.decoder}
        return [f"{name}.{one}" for name, tower in some.items() for one in tower.outer()]

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        memory = self.encoder(self.embedded(x, ids), ids)
        for bridge in members(self.bridges):
            memory = memory + bridge(memory)
        return self.ended(self.decoder(x + memory, ids) + memory, ids)


class Down(nn.Module):
    """A level of a U: several blocks, and one behind them."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.resnets = listed([draw.choice([Dense, Heads, Experts])(draw) for _ in range(draw.randint(1, 3))], "list")
        self.scale = draw.choice([nn.Linear(W, W), nn.ModuleList([nn.Linear(W, W)])])

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        for one in members(self.resnets):
            x = one(x, ids)
        scale = self.scale[0] if isinstance(self.scale, nn.ModuleList) else self.scale
        made: Tensor = scale(x)
        return made


class UShaped(Drawn):
    """Down, through the middle, and up with what each level left; levels are modules, or lists of them."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__(draw)
        count = draw.randint(2, 3)
        self.lists = draw.random() < 0.4
        make: Callable[[random.Random], nn.Module] = blocks_listed if self.lists else Down
        self.downs = nn.ModuleList([make(draw) for _ in range(count)])
        self.middle = draw.choice([Dense, Experts, Heads])(draw)
        self.ups = nn.ModuleList([make(draw) for _ in range(count)])

    @property
    def outer(self) -> list[str]:
        return [
            f"{side}.{at}.{inner}" if self.lists else f"{side}.{at}"
            for side in ("downs", "ups")
            for at, level in getattr(self, side).named_children()
            for inner in ([name for name, _ in level.named_children()] if self.lists else [""])
        ]

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        x, left = self.embedded(x, ids), []
        for level in members(self.downs):
            for one in members(level) if self.lists else [level]:
                x = one(x, ids)
            left.append(x)
        x = self.middle(x, ids)
        for level in members(self.ups):
            x = x + left.pop()
            for one in members(level) if self.lists else [level]:
                x = one(x, ids)
        return self.ended(x, ids)


class Beside(Drawn):
    """Blocks, each with what another list has for it: an adapter, a norm, a mixture."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__(draw)
        self.blocks = blocks_listed(draw)
        beside = [draw.choice([Dense, Experts])(draw) for _ in members(self.blocks)]
        self.adapters = listed(beside, list_kind(draw))
        self.last = draw.choice([Dense, Experts, Branches])(draw)
        self.first = draw.choice([Dense, Experts, Branches])(draw)

    @property
    def outer(self) -> list[str]:
        return [f"blocks.{name}" for name, _ in self.blocks.named_children()]

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        x = self.first(self.embedded(x, ids), ids)
        for block, adapter in zip(members(self.blocks), members(self.adapters), strict=True):
            x = adapter(block(x, ids), ids)
        return self.ended(self.last(x, ids), ids)


SHAPES: list[Callable[[random.Random], Drawn]] = [Flat, Flat, Towers, EncoderDecoder, UShaped, Beside]


def drawn_model(seed: int) -> Drawn:
    """The model with this number, always the same, on the generator that torch has."""
    draw = random.Random(seed)
    return draw.choice(SHAPES)(draw)


def drawn_batch() -> dict[str, Tensor]:
    """A batch of 8 rows and their tokens, from the generator that torch has."""
    return {"x": torch.randn(8, W), "ids": torch.randint(0, IDS, (8,))}
