"""Tests every undocumented part of torch that gpipe uses, one at a time, to find what a new version of torch breaks.

A failure names the broken part of `gpipe._torch`, its purpose and the modules that use it. Fix it there.
"""

import ast
import inspect
import subprocess
import sys
import textwrap
import threading
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore, TCPStore
from torch._prims import rng_prims
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.func import vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from torch.utils.checkpoint import CheckpointFunction, checkpoint
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count
from torch.utils.weak import WeakIdKeyDictionary

import gpipe
from gpipe._torch import accelerator, autograd, dispatcher, modes, modules, trees
from gpipe._torch import checkpoint as checkpoints
from gpipe._torch.checkpoint import CheckpointFrame
from gpipe.tracing.interpreter import Placeholder

SOURCE = Path(gpipe.__file__).parent
PRIVATE = SOURCE / "_torch"
ALLOWED = {
    "_parameters": "the parameters of a module, by name; many tools that replace parameters use it",
    "_buffers": "the buffers of a module",
    "_modules": "the children of a module",
    "_apply": "called by `to` and similar methods; modules override it",
    "_version": "the number of in-place changes of a tensor; torch's notes on autograd mention it",
    "_base": "the tensor of which a tensor is a view",
    "_indices": "the indices of an uncoalesced sparse tensor; the documentation of torch.sparse mentions it",
    "_getframe": "of sys",
    "_rand": "the global generator of numpy.random",
    "_abc_impl": "an attribute that abc sets on a class",
    "_waiters": "of threading.Condition: the threads that wait",
    "_lru_cache_wrapper": "of functools",
    "_loss_function": "the loss function of a model of transformers",
    "_exit": "of os",
    "_init_weights": "initializes a module, in transformers and similar models",
    "_no_split_modules": "the blocks that a model of transformers declares",
    "_heterogeneity_spec": "set on a configuration of transformers whose blocks have different settings",
    "_output_capturing_hooks_installed": "set on a model of transformers with collecting hooks",
    "_supports_mm_encoder_outputs": "read by `generate` of transformers",
    "_prepare_text_encoder_decoder_kwargs_for_generation": "runs the encoder in `generate` of transformers",
    "_decoder_start_token_tensor": "the first token in `generate` of transformers",
    "_original_forward": "set by accelerate on a prepared module",
    "_asdict": "of a namedtuple",
    "_fields": "of a namedtuple",
    "_replace": "of a namedtuple",
}
"""Private names of torch and other libraries that modules outside `_torch` may use, each with its meaning."""
UNDOCUMENTED = {
    "redispatch": {"stages/rng.py"},
    "autocast_increment_nesting": {"stages/thread_state.py"},
    "autocast_decrement_nesting": {"stages/thread_state.py"},
    "BackwardCFunction": {"stages/boundary.py", "stages/rng.py"},
    "conv_flop_count": {"planner/profile.py"},
    "sdpa_flop_count": {"planner/profile.py"},
    "sdpa_backward_flop_count": {"planner/profile.py"},
    "WeakIdKeyDictionary": {"stages/remote_layers.py"},
}
"""Undocumented names of torch without an underscore, and the modules that use them."""


@cache
def modules_of_ours() -> dict[str, ast.Module]:
    """Returns the syntax tree of each source file, by path."""
    return {file.relative_to(SOURCE).as_posix(): ast.parse(file.read_text()) for file in sorted(SOURCE.rglob("*.py"))}


def imported_from_private(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom("gpipe._torch"):
                modules = {alias.name for alias in node.names}
                held = (one for one in ast.walk(tree) if isinstance(one, ast.Attribute))
                yield from (one.attr for one in held if isinstance(one.value, ast.Name) and one.value.id in modules)
            case ast.ImportFrom(str(module)) if module.startswith("gpipe._torch."):
                yield from (alias.name for alias in node.names)


@cache
def users() -> dict[str, set[str]]:
    """Returns the names that each module imports from `_torch`."""
    return {path: set(imported_from_private(tree)) for path, tree in modules_of_ours().items()}


@contextmanager
def relied_on(name: str, purpose: str) -> Iterator[None]:
    """Adds the purpose and the users of a name in `_torch` to an error inside the context."""
    try:
        yield
    except Exception as error:
        files = ", ".join(path for path, names in users().items() if name in names)
        raise AssertionError(
            f"torch {torch.__version__} breaks {name} of gpipe._torch, which {purpose}. It is used in {files}."
        ) from error


# ---- who may use what ----


def own_private_names() -> set[str]:
    """Returns the private names that gpipe itself defines: functions, classes, and attributes of self."""
    names: set[str] = set()
    for node in (node for tree in modules_of_ours().values() for node in ast.walk(tree)):
        match node:
            case ast.FunctionDef(name) | ast.ClassDef(name):
                names.add(name)
            case ast.Name(name, ast.Store()) | ast.Attribute(ast.Name("self"), name, ast.Store()):
                names.add(name)
            case ast.ImportFrom(module, aliases) if not (module or "").startswith("torch"):
                names |= {alias.name for alias in aliases}
    return names


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith(("__", "_gpipe")) and name != "_"


def foreign(tree: ast.AST, own: set[str]) -> set[str]:
    """Returns the private names of other libraries that code uses, also in strings."""
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name) | ast.Constant(str(name)) if name.isidentifier():
                names |= {name} - own if is_private(name) else set()
            case ast.Import(aliases):
                names |= {part for alias in aliases for part in alias.name.split(".") if is_private(part)}
            case ast.ImportFrom(module, aliases) if (module or "").startswith("torch"):
                parts = [*(module or "").split("."), *(alias.name for alias in aliases)]
                names |= {part for part in parts if is_private(part)}
    return names - ALLOWED.keys()


def named(tree: ast.AST) -> set[str]:
    """Returns the names that code imports or uses as attributes."""
    nodes = list(ast.walk(tree))
    imported = {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    return imported | {node.attr for node in nodes if isinstance(node, ast.Attribute)}


def test_what_torch_does_not_document_is_used_where_it_is_listed_and_nowhere_else() -> None:
    found = {path: named(tree) for path, tree in modules_of_ours().items() if not path.startswith("_torch/")}
    assert {name: {path for path, names in found.items() if name in names} for name in UNDOCUMENTED} == UNDOCUMENTED
    told = gpipe._torch.__doc__ or ""
    assert [name for name in UNDOCUMENTED if name not in told] == []


def test_no_other_module_uses_what_is_private_to_torch() -> None:
    own = own_private_names()
    apart = ("_torch/", "integrations/")  # the latter override what another library keeps to itself
    found = {path: foreign(tree, own) for path, tree in modules_of_ours().items() if not path.startswith(apart)}
    assert {path: names for path, names in found.items() if names} == {}


def offered() -> set[str]:
    """Returns the public names of `_torch`."""
    names = {alias.name for alias in trees_imported() if alias.asname == alias.name}
    for path in (path for path in modules_of_ours() if path.startswith("_torch/")):
        for node in modules_of_ours()[path].body:
            match node:
                case ast.FunctionDef(name) | ast.ClassDef(name) | ast.AnnAssign(ast.Name(name)):
                    names |= set() if is_private(name) else {name}
    return names


def trees_imported() -> Iterator[ast.alias]:
    for node in modules_of_ours()["_torch/trees.py"].body:
        if isinstance(node, ast.ImportFrom):
            yield from node.names


def test_whatever_is_offered_is_used_and_tried_here() -> None:
    calls = [node for node in ast.walk(ast.parse(Path(__file__).read_text())) if isinstance(node, ast.Call)]
    tried = {ast.literal_eval(call.args[0]) for call in calls if ast.unparse(call.func) == "relied_on"}
    used = set().union(*users().values())
    assert offered() - used == set()
    assert offered() - tried == set()


def test_an_encoder_of_torch_asks_how_its_mask_lies_before_it_nests() -> None:
    class Calls(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(function.__name__)
            return function(*args, **kwargs or {})

    names: list[str] = []
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 4, batch_first=True), 2).eval()
    with relied_on("CHECKS_MASK_ALIGNMENT", "rejects encoders that use nested tensors"), torch.no_grad(), Calls():
        encoder(torch.zeros(2, 3, 4), src_key_padding_mask=torch.zeros(2, 3, dtype=torch.bool))
        assert dispatcher.CHECKS_MASK_ALIGNMENT in names


def test_what_a_node_saved_lies_in_another_storage_as_it_did_before() -> None:
    saved: list[autograd.SavedTensor] = []

    def pack(tensor: Tensor) -> autograd.SavedTensor:
        saved.append(autograd.SavedTensor.of(tensor))
        return saved[-1]

    with (
        relied_on("SavedTensor", "offloads saved tensors, and restores them"),
        relied_on("unpack", "returns them to autograd"),
    ):
        x = torch.randn(4, 3, requires_grad=True)
        with saved_tensors_hooks(pack, autograd.unpack):
            y = (x * 2).t().exp()
        (one,) = saved
        assert one.is_as_saved
        storage = one.tensor.untyped_storage().clone()
        one.release_storage()
        with pytest.raises(RuntimeError, match="are offloaded to host memory"):
            autograd.unpack(one)
        one.restore_storage(storage)
        y.sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, 2 * (x.detach() * 2).exp())


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2


def test_the_names_that_stay_where_they_are_do_what_they_say() -> None:
    layer = nn.BatchNorm1d(2)
    assert layer._parameters["weight"] is layer.weight
    assert layer._buffers["running_mean"] is layer.running_mean
    assert nn.Sequential(layer)._modules["0"] is layer
    assert layer._apply(lambda tensor: tensor + 1) is layer
    tensor = torch.zeros(3)
    before, view = tensor._version, tensor[1:]
    view.add_(1)
    assert (tensor._version, view._base is tensor) == (before + 1, True)
    assert callable(torch.ops.aten.rand.default.redispatch)
    assert (torch.autocast_increment_nesting(), torch.autocast_decrement_nesting()) == (1, 0)
    made = Doubled.apply(torch.ones(1, requires_grad=True))
    assert isinstance(made.grad_fn, torch.autograd.function.BackwardCFunction)
    assert conv_flop_count([1, 2, 4], [3, 2, 1], [1, 3, 4]) == 2 * 4 * 3 * 2
    kept = WeakIdKeyDictionary({tensor: 1})
    assert tensor in kept
    assert view not in kept
    del tensor, view
    assert len(kept) == 0


# ---- trees ----


class Pair:
    """A class that is registered in torch's trees."""

    def __init__(self, one: object, other: object) -> None:
        self.both = [one, other]


_pytree.register_pytree_node(
    Pair,
    lambda pair: (pair.both, "context"),
    lambda both, _: Pair(*both),
    serialized_type_name="tests.Pair",
    to_dumpable_context=lambda context: [context],
    from_dumpable_context=lambda written: written[0],
)


def test_trees() -> None:
    value = {"a": [torch.ones(1), 2], "b": (3,)}
    with relied_on("tree_flatten", "splits values at stage boundaries into leaves"):
        leaves, spec = trees.tree_flatten(value)
        assert leaves == [value["a"][0], 2, 3]
    with relied_on("tree_unflatten", "rebuilds values after a stage boundary"):
        assert trees.tree_unflatten([4, 5, 6], spec) == {"a": [4, 5], "b": (6,)}
    with relied_on("tree_leaves", "finds tensors in values"):
        assert trees.tree_leaves(value) == leaves
    with relied_on("tree_map", "copies a module to the meta device"):
        assert trees.tree_map(lambda leaf: leaf + 1, [1, (2,)]) == [2, (3,)]
    with relied_on("map_tensors", "replaces tensors in values"):
        made = trees.map_tensors({"a": (Pair(torch.ones(1), 2), deque([2])), "b": [None]}, lambda tensor: tensor + 1)
        assert made["a"][0].both == [2, 2]
        assert (made["a"][1], made["b"]) == (deque([2]), [None])
    with relied_on("tree_flatten_with_path", "finds what cannot be split"):
        found = trees.tree_flatten_with_path({"a": [1, 2], "b": (3,)}, is_leaf=lambda item: isinstance(item, list))[0]
        with relied_on("keystr", "names the path of a leaf in messages"):
            assert [(trees.keystr(path), leaf) for path, leaf in found] == [("['a']", [1, 2]), ("['b'][0]", 3)]


class Both(NamedTuple):
    one: object
    other: object


LEAF = st.sampled_from([torch.ones(1), nn.Parameter(torch.ones(2)), 1, 2.5, True, "word", None, object()])
VALUES = st.recursive(
    LEAF,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("ab"), inner),
        st.dictionaries(st.sampled_from("ab"), inner).map(OrderedDict),
        st.dictionaries(st.sampled_from("ab"), inner).map(lambda held: defaultdict(list, held)),
        st.lists(inner, max_size=3).map(deque),
        st.builds(Both, inner, inner),
        st.builds(Pair, inner, inner),
    ),
    max_leaves=8,
)


@given(VALUES)
def test_plain_containers_are_walked_as_torch_walks_them(value: object) -> None:
    leaves = _pytree.tree_leaves(value)
    assert list(map(id, trees.tree_leaves(value))) == list(map(id, leaves))
    changed = {id(leaf): torch.ones(3) for leaf in leaves if isinstance(leaf, Tensor)}
    ours = trees.map_tensors(value, lambda tensor: changed[id(tensor)])
    torchs = _pytree.tree_map_only(Tensor, lambda tensor: changed[id(tensor)], value)
    (found, spec), (expected, other) = _pytree.tree_flatten(ours), _pytree.tree_flatten(torchs)
    assert spec == other
    assert list(map(id, found)) == list(map(id, expected))


def test_a_size_stays_one() -> None:
    with relied_on("map_tensors", "keeps the class torch.Size"):
        assert trees.map_tensors((torch.ones(2), torch.Size([2])), torch.neg)[1].numel() == 2


def test_context_variables_of_torch_are_known() -> None:
    with relied_on("variables_of_torch", "distinguishes variables of layers from variables of compilers"):
        import torch._dynamo.variables.base as dynamo
        from torch._inductor import config as inductor

        found, users = modes.variables_of_torch(), ContextVar("users", default=0)
        assert dynamo._vt_active_calls in found
        assert vars(inductor)["_config"]["deterministic"].user_override in found
        assert users not in found


def test_devices_of_any_maker() -> None:
    """Tests on a CPU. tests/accelerator has tests on a simulated accelerator."""
    cpu, meta = accelerator.CPU, torch.device("meta")
    with (
        relied_on("accelerators", "finds devices for ranks"),
        relied_on("initialized_accelerators", "restores generators"),
    ):
        assert (
            len(accelerator.accelerators())
            == torch.accelerator.device_count()
            >= len(accelerator.initialized_accelerators())
        )
    with relied_on("kinds", "passes the autocast of each device type to rank threads"):
        assert accelerator.kinds()[0] == "cpu"
    with relied_on("queues", "decides which devices need streams"):
        assert [accelerator.queues(torch.device(kind)) for kind in ("cpu", "meta", "mps", "cuda")] == [False] * 3 + [
            True
        ]
    with relied_on("numbered", "gives each device one name"):
        assert [accelerator.numbered(device) for device in (torch.device("cpu", 0), meta)] == [cpu, meta]
    with relied_on("default_generator", "uses torch's default generators"):
        assert accelerator.default_generator(cpu) is accelerator.default_generator(meta) is torch.default_generator
    generator, again = (torch.Generator().manual_seed(5) for _ in range(2))
    before = torch.default_generator.get_state()
    with relied_on("standing_in", "keys random operations without a generator argument"):
        for _ in range(2):
            with accelerator.standing_in(generator):
                assert torch.equal(torch.rand(3), torch.rand(3, generator=again))
    assert torch.equal(torch.default_generator.get_state(), before)
    with relied_on("own_generator", "reads the state of a default generator"), accelerator.own_generator(cpu) as own:
        assert own is torch.default_generator
    with relied_on("copied_to_host", "copies checkpoints to the host in the background"):
        (copy,) = accelerator.copied_to_host([generator.get_state()])
        assert torch.equal(copy, again.get_state())
    with relied_on("queued_on", "queues kernels on a stream"), accelerator.queued_on(None):
        assert torch.ones(1).is_cpu
    with relied_on("current_stream", "makes a rank wait for its caller's kernels"):
        assert callable(torch.accelerator.current_stream)
    linear = nn.Linear(2, 2)
    linear.weight.register_hook(lambda gradient: None)
    with relied_on("keep_parameters", "keeps optimizers valid that were created before the pipe"):
        accelerator.keep_parameters(linear, meta, lambda tensor: tensor.to(meta))
        assert linear.weight.is_meta
    with relied_on("put_data", "keeps hooks of parameters"):
        accelerator.put_data(linear.weight, torch.ones(2, 2))
        assert linear.weight.is_cpu
        assert linear.weight._backward_hooks
    with relied_on("synchronize", "measures layers"):
        accelerator.synchronize(cpu)
    with relied_on("memory_of", "bounds plans"), relied_on("name_of", "names devices in plans"):
        assert accelerator.memory_of(cpu) > 2**20
        assert accelerator.name_of(cpu)


def test_a_dataclass_can_be_a_node() -> None:
    with relied_on("OpenDataclass", "splits dataclasses into leaves"):
        leaves, spec = trees.tree_flatten(trees.OpenDataclass(Line, {"one": 1, "other": 2}))
        assert leaves == [1, 2]
        assert trees.tree_unflatten([3, 4], spec) == Line(3, 4)


@dataclass
class Line:
    one: int
    other: int


def test_a_structure_can_be_read_and_made() -> None:
    with relied_on("TreeSpec", "describes the structure of a value in messages between ranks"):
        spec = trees.tree_flatten({"a": [1, 2]})[1]
        assert (spec.type, spec.context, spec.num_leaves) == (dict, ["a"], 2)
        inner = spec.children()[0]
        leaf = inner.children()[0]
        assert (inner.type, inner.context, leaf.type) == (list, None, None)
        assert trees.TreeSpec(dict, ["a"], [trees.TreeSpec(list, None, [leaf, leaf])]) == spec


def test_registered_classes_are_known_by_name() -> None:
    with relied_on(
        "registration", "names a class of the user in a message, and writes what it keeps beside its leaves"
    ):
        known = trees.registration(Pair)
        assert (known.serialized_type_name, trees.registration(set)) == ("tests.Pair", None)
        assert trees.registration(list).serialized_type_name == "builtins.list"
        assert known.from_dumpable_context(known.to_dumpable_context("context")) == "context"
    with relied_on("registered_class", "finds a registered class by the name in a message"):
        assert (trees.registered_class("tests.Pair"), trees.registered_class("nobody.Knows")) == (Pair, None)


# ---- autograd ----


def test_gradients_are_accumulated() -> None:
    weight = torch.ones(2, requires_grad=True)
    with relied_on("accumulate_gradients", "runs the backward pass of a stage"):
        for _ in range(2):
            autograd.accumulate_gradients([weight * 2, weight * 3], [torch.ones(2), torch.ones(2)])
        assert weight.grad is not None
        assert weight.grad.tolist() == [10, 10]
        other = torch.ones(2, requires_grad=True)
        edge = get_gradient_edge(weight)
        autograd.accumulate_gradients([weight * other], [torch.ones(2)], [edge])
        assert weight.grad.tolist() == [11, 11]
        assert other.grad is None
        autograd.accumulate_gradients([edge], [torch.ones(3, 2)])
        assert weight.grad.tolist() == [14, 14]  # summed to its shape


def product_nodes() -> dict[str, Any]:
    """Returns a node of each kind of product."""
    x, weight, bias = torch.randn(4, 5), torch.randn(3, 5, requires_grad=True), torch.randn(3, requires_grad=True)
    image, kernel = torch.randn(1, 2, 5, 5), torch.randn(3, 2, 3, 3, requires_grad=True)
    return {
        "AddmmBackward0": F.linear(x, weight, bias).grad_fn,
        "MmBackward0": F.linear(x, weight).grad_fn,
        "BmmBackward0": torch.bmm(x[None], weight.t()[None]).grad_fn,
        "ConvolutionBackward0": F.conv2d(image, kernel, bias).grad_fn,
    }


def test_products_are_known_with_the_places_of_their_weights() -> None:
    with relied_on("WEIGHT_SLOTS", "finds the products whose weight gradients can be deferred"):
        nodes = product_nodes()
        assert {kind.__name__: kind for kind in autograd.WEIGHT_SLOTS} == {n: type(f) for n, f in nodes.items()}
    with relied_on("LEAF_NODE", "finds the leaves of a backward pass"):
        leaf, _ = nodes["AddmmBackward0"].next_functions[0]
        assert leaf.variable.shape == (3,)
        assert type(leaf) is autograd.LEAF_NODE
    with relied_on("LAYOUT_NODES", "finds weights that were transposed or cast for a product"):
        weight = torch.randn(1, 2, 3, requires_grad=True)
        laid = (
            weight[0].new_tensor(weight.tolist()).requires_grad_(),
            weight.transpose(0, 1),
            weight.permute(2, 0, 1),
            weight.view(6),
            weight.expand(4, 2, 3),
            weight.unsqueeze(0),
            weight.squeeze(0),
            weight.clone(),
            weight.to(torch.float64),
            torch.randn(2, 3, requires_grad=True).t(),
            torch.ops.aten._unsafe_view(weight, [6]),
        )
        kinds = {type(one.grad_fn) for one in laid if one.grad_fn is not None}
        assert kinds == autograd.LAYOUT_NODES
    with relied_on("PLAIN", "excludes weights of Tensor subclasses"):
        assert {Tensor, nn.Parameter} == autograd.PLAIN


@pytest.mark.parametrize("name", product_nodes())
def test_the_gradients_of_a_products_weights_are_those_of_torch(name: str) -> None:
    with (
        relied_on("Product", "keeps the inputs of deferred weight gradients"),
        relied_on("read_product", "computes them later"),
    ):
        node = product_nodes()[name]
        product: autograd.Product | None = autograd.read_product(node)
        assert product is not None
        slots = tuple(slot for slot in autograd.WEIGHT_SLOTS[type(node)] if node.next_functions[slot][0] is not None)
        dy = torch.randn(1, 3, 3, 3) if name == "ConvolutionBackward0" else torch.randn(4, 3)
        dy = dy[None] if name == "BmmBackward0" else dy
        expected = node(dy)
        expected = expected if isinstance(expected, tuple) else (expected,)
        found = product.gradients(dy, slots)
        assert all(torch.equal(one, expected[slot]) for one, slot in zip(found, slots, strict=True))


def test_what_a_product_saved_is_not_read_where_hooks_unpack_it_or_the_formulas_do_not_hold() -> None:
    weight, bias = torch.randn(5, 3, requires_grad=True), torch.randn(3)
    with relied_on("read_product", "computes deferred weight gradients"):
        with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            hooked = torch.mm(torch.randn(4, 5), weight)
        assert autograd.read_product(hooked.grad_fn) is None
        assert autograd.read_product(torch.addmm(bias, torch.randn(4, 5), weight, alpha=2).grad_fn) is None
        assert autograd.read_product(torch.mm(torch.randn(4, 5).to_sparse(), weight).grad_fn) is None
        x = torch.randn(4, 5)
        read: autograd.Product | None = autograd.read_product(torch.mm(x, weight).grad_fn)
        assert read is not None
        x.add_(1)
        assert read.x._version == x._version


def test_hooks_on_nodes_are_seen() -> None:
    with relied_on("has_node_hooks", "detects hooks that would see weight gradients"):
        node = product_nodes()["AddmmBackward0"]
        assert not autograd.has_node_hooks(node)
        handle = node.register_hook(lambda made, came: None)
        assert autograd.has_node_hooks(node)
        handle.remove()
        assert not autograd.has_node_hooks(node)


class Asks(torch.autograd.Function):
    """Records in its backward whether the leaf's node will run, and which node runs."""

    answers: list[tuple[bool, int]]

    @staticmethod
    def forward(ctx: Any, answers: list[tuple[bool, int]], anchor: Tensor, x: Tensor) -> Tensor:
        ctx.answers, ctx.anchor = answers, get_gradient_edge(anchor).node
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor]:
        ctx.answers.append((autograd.will_run(ctx.anchor), autograd.node_number(autograd.running_node())))
        return None, None, gradient * 2


def asked() -> tuple[Tensor, Tensor, list[tuple[bool, int]]]:
    answers: list[tuple[bool, int]] = []
    x = torch.ones(1, requires_grad=True)
    return Asks.apply(answers, torch.empty(0, requires_grad=True), x), x, answers


def test_a_node_knows_what_a_backward_is_for() -> None:
    with relied_on("will_run", "rejects a backward pass for only some inputs"):
        out, _, answers = asked()
        out.backward()
        out, x, later = asked()
        torch.autograd.grad(out, x)
        assert [answer for answer, _ in answers + later] == [True, False]


def test_nodes_are_numbered_as_they_are_made() -> None:
    with (
        relied_on("next_node_number", "shows which nodes a layer creates"),
        relied_on("node_number", "finds the layer of a node"),
    ):
        number = autograd.next_node_number()
        out, _, answers = asked()
        assert out.grad_fn is not None
        assert number <= autograd.node_number(out.grad_fn) < autograd.next_node_number()
    with relied_on("running_node", "finds the layer that uses random numbers in its backward"):
        out.backward()
        assert answers[0][1] == autograd.node_number(out.grad_fn)


def test_hooks_on_tensors_are_seen() -> None:
    with relied_on("gradient_hooks_of", "restores state that gradient hooks changed"):
        leaf = torch.ones(2, requires_grad=True)
        heard: list[str] = []
        leaf.register_hook(lambda _: heard.append("gradient"))
        leaf.register_post_accumulate_grad_hook(lambda _: heard.append("accumulated"))
        assert [len(hooks) for hooks in autograd.gradient_hooks_of(leaf)] == [1, 1]
    with relied_on("has_gradient_hooks", "detects hooks on boundary tensors"):
        one = torch.ones(1, requires_grad=True) * 1
        assert not autograd.has_gradient_hooks(one)
        one.register_hook(lambda gradient: None)
        assert autograd.has_gradient_hooks(one)
    with relied_on("has_hooks", "rejects hooks on tensors that gpipe initializes"):
        put = (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook)
        leaves = [torch.ones(1, requires_grad=True) for _ in put]
        assert [autograd.has_hooks(leaf) for leaf in leaves] == [False, False]
        for register, leaf in zip(put, leaves, strict=True):
            register(leaf, lambda gradient: None)
        assert [autograd.has_hooks(leaf) for leaf in leaves] == [True, True]


def test_what_python_refers_to_is_known() -> None:
    with relied_on("is_held", "copies gradients that other code still refers to"):
        tensors = [torch.ones(4), torch.ones(4)[1:]]
        assert [autograd.is_held(tensors, at) for at in range(2)] == [False, False]
        workspace, whole = tensors[0], tensors[1]._base
        assert whole is not None
        assert [autograd.is_held(tensors, at) for at in range(2)] == [True, True]
        del workspace, whole
        assert [autograd.is_held(tensors, at) for at in range(2)] == [False, False]


def test_tensors_of_one_memory_are_counted() -> None:
    with relied_on(
        "memory_users", "copies a gradient before it goes to another stage while a leaf has it for its own"
    ):
        one = torch.ones(4)
        assert autograd.memory_users(one) == 1
        view = one[1:]
        assert (autograd.memory_users(one), autograd.memory_users(view)) == (2, 1)
        another = one[2:]
        assert autograd.memory_users(view) == 2
        del one, another
        assert autograd.memory_users(view) == 1


def test_forward_mode_is_seen() -> None:
    with relied_on("is_differentiated_forward", "rejects forward-mode tangents"):
        assert not autograd.is_differentiated_forward()
        with forward_ad.dual_level():
            assert autograd.is_differentiated_forward()


def test_tensors() -> None:
    with relied_on("copy_each", "writes summed gradients back"):
        into = [torch.zeros(2), torch.zeros(1)]
        autograd.copy_each(into, torch.arange(3.0).split([2, 1]))
        assert [tensor.tolist() for tensor in into] == [[0, 1], [2]]
    with relied_on("negative_view", "copies a negative view"):
        one = torch.ones(2)
        assert autograd.negative_view(one).is_neg()
        assert autograd.negative_view(autograd.negative_view(one)).data_ptr() == one.data_ptr()


# ---- modes, and the compiler ----


def test_a_rank_that_leaves_an_autocast_is_heard_of() -> None:
    with relied_on("as_rank", "keeps a rank's casts of weights while another rank leaves its autocast"):
        with modes.as_rank():
            assert torch.clear_autocast_cache is not modes._clear_cache
            with torch.autocast("cpu", torch.bfloat16):
                assert modes._rounds._inside == {threading.get_ident()}
            assert not modes._rounds._inside | modes._rounds._left
        with torch.autocast("cpu", torch.bfloat16):  # no rank
            assert not modes._rounds._inside
        assert torch.clear_autocast_cache is modes._clear_cache
        assert torch.autocast_increment_nesting is modes._increment_nesting


def test_a_rank_enters_again_when_the_casts_of_before_are_forgotten() -> None:
    forgot: list[str] = []
    rounds = modes._Rounds(lambda: forgot.append(threading.current_thread().name))
    went_on = threading.Event()

    def other() -> None:
        for _ in range(2):
            rounds.enter()
            rounds.leave()
        went_on.set()

    rounds.enter()
    thread = threading.Thread(target=other, name="other")
    thread.start()
    assert not went_on.wait(0.2)
    assert not forgot
    rounds.leave()
    thread.join(60)
    assert forgot[0] == threading.current_thread().name


def test_what_is_set_in_a_thread_is_seen() -> None:
    def pack(tensor: Tensor) -> Tensor:
        return tensor

    with relied_on("saved_tensor_hooks", "applies save_on_cpu and similar hooks in rank threads"):
        assert modes.saved_tensor_hooks() is None
        with saved_tensors_hooks(pack, pack):
            assert modes.saved_tensor_hooks() == (pack, pack)
        assert modes.saved_tensor_hooks() is None
    with (
        relied_on("OwnMode", "observes calls of a loss or layer, and is not a mode of the user"),
        modes.OwnMode(),
    ):
        assert modes.modes_here() == (None, [])
    with relied_on("modes_here", "sets the default device in rank threads, and rejects other modes"):
        assert modes.modes_here() == (None, [])
        counter, listener = FlopCounterMode(display=False), TorchFunctionMode()
        with torch.device("meta"), listener, counter:
            device, others = modes.modes_here()
        assert device == torch.device("meta")
        assert others[0] is listener
        assert len(others) == 2


def test_a_mode_that_is_paused_sees_nothing() -> None:
    class Sees(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen: list[object] = []
    with relied_on("paused", "hides calls inside units from the interpreter"):
        with Sees() as mode:
            torch.ones(2)
            with modes.paused(mode):
                torch.ones(2)
                with Sees(), modes.paused(mode):  # which stands below another now
                    torch.ones(2)
            torch.ones(2)
        assert len(seen) == 3


def test_operations_are_seen_with_those_of_backwards() -> None:
    class Sizes(dispatcher.Operations):
        def __init__(self) -> None:
            super().__init__()
            self.found: list[int] = []

        def see(self, given: Sequence[Tensor], made: Sequence[Tensor]) -> None:
            self.found += [tensor.numel() for tensor in made]

    with relied_on("Operations", "measures the memory of activations"):
        x, sizes = torch.ones(3, requires_grad=True), Sizes()
        with sizes:
            y = x * 2
        forward = len(sizes.found)
        y.sum().backward()
        assert sizes.found == [3]
        with sizes:
            (x * 2).sum().backward()
        assert len(sizes.found) > forward + 2


def test_a_subclass_of_tensor_can_be_taken_for_a_plain_tensor() -> None:
    class Refuses(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise TypeError

    refuses = torch.ones(2).as_subclass(Refuses)
    with relied_on("as_plain_tensors", "answers queries of a placeholder's layout"):
        with modes.as_plain_tensors():
            assert refuses.shape == (2,)
        with pytest.raises(TypeError):
            _ = refuses.shape


def test_operations_are_counted_without_hooks_on_what_modules_take() -> None:
    layer, x = nn.Linear(3, 5), torch.ones(2, 3, requires_grad=True)
    with relied_on("flop_counter", "counts the operations of layers"):
        with modes.flop_counter({}) as counter:
            out = layer(x)
            assert counter.get_total_flops() == 2 * 2 * 3 * 5
            assert x._backward_hooks is None
            assert out._backward_hooks is None
            out.sum().backward()
        assert counter.get_total_flops() == 3 * 2 * 2 * 3 * 5
    heads = torch.ones(1, 2, 4, 8, requires_grad=True)
    told = {modes.ATTENTION_ON_CPU: "forward", modes.ATTENTION_ON_CPU_BACKWARD: "backward"}
    with relied_on("ATTENTION_ON_CPU", "counts the operations of attention"):
        seen: list[str] = []

        def noting(name: str) -> Callable[..., int]:
            def note(*_: Any, **__: Any) -> int:
                seen.append(name)
                return len(seen)

            return note

        formulas = {kind: noting(name) for kind, name in told.items()}
        with modes.flop_counter(formulas):
            F.scaled_dot_product_attention(heads, heads, heads).sum().backward()
        assert seen == ["forward", "backward"]


def test_a_tensor_without_values_says_to_be_on_the_cpu() -> None:
    faking, weight = dispatcher.Fakes(), nn.Parameter(torch.empty(4, 3, device="meta"))
    with relied_on("Fakes", "traces models on the meta device"):
        like = faking.like(weight)
        assert isinstance(like, nn.Parameter)
        with faking.inside():
            made = F.embedding(torch.tensor([[1, 2]]), like)
            assert made.shape == (1, 2, 3)
            assert made.device.type == "cpu"
            assert made.requires_grad
            assert made.float() is made
            for needs in (made.sum().item, made.nonzero):
                with pytest.raises(dispatcher.NEEDS_VALUES):
                    needs()
    with relied_on("Fakes", "counts the operations of experts"):
        ends = torch.tensor([2, 6, 8], dtype=torch.int32)
        for a, b, groups in ((2, 3, ends), (3, 2, ends), (2, 2, ends), (3, 3, None)):
            one, other = (torch.ones((3, 8, 8)[-dimensions:]) for dimensions in (a, b))
            real = F.grouped_mm(one, other, offs=groups)
            with faking.inside():
                made = F.grouped_mm(faking.like(one), other, offs=groups)
            assert (made.shape, made.stride(), made.dtype) == (real.shape, real.stride(), real.dtype)
    with relied_on("without_memory", "creates placeholders in a fake mode"):
        with faking.inside():
            made_by_others = dispatcher.without_memory(Placeholder, (2, 3), torch.float64, torch.device("cuda"), True)
        assert type(made_by_others) is Placeholder
        assert (made_by_others.shape, made_by_others.is_cuda, made_by_others.requires_grad) == ((2, 3), True, True)
    with relied_on("is_fake", "distinguishes fake tensors from real ones"):
        assert dispatcher.is_fake(made)
        assert not dispatcher.is_fake(weight)
    with relied_on("NEEDS_VALUES", "detects operators that need values"):
        assert all(issubclass(kind, RuntimeError) for kind in dispatcher.NEEDS_VALUES)


def test_a_module_holds_the_state_of_another() -> None:
    one, other = nn.Module(), nn.BatchNorm1d(2)
    with relied_on("hold_state_of", "gives a pipe the names of its model"):
        modules.hold_state_of(one, other)
        other.register_buffer("late", torch.ones(1), persistent=False)
        assert one.state_dict().keys() == other.state_dict().keys()
        assert one.late is other.late


def test_transforms_and_compilers_that_look_on_are_seen() -> None:
    seen = []

    def look(x: Tensor) -> Tensor:
        seen.append((modes.is_vmapped(), modes.is_traced_by_compiler()))
        return x + 1

    with relied_on("is_vmapped", "does not key random operations inside vmap"):
        look(torch.ones(2))
        vmap(look)(torch.ones(2))
        assert seen == [(False, False), (True, False)]
    with relied_on("is_traced_by_compiler", "does not key random operations that a compiler traces"):
        make_fx(look, tracing_mode="fake")(torch.ones(2))
        assert seen[2:] == [(False, True)]


@modes.untraced
def hidden(x: Tensor) -> Tensor:
    return x.sin()


def test_a_function_that_is_untraced_is_no_part_of_a_graph() -> None:
    code = []

    def note(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        code.append(graph.code)
        return graph.forward

    with relied_on("untraced", "keeps the compiler out of a pipe"):
        found = torch.compile(lambda x: hidden(x * 2) + 1, backend=note)(torch.ones(2))
        assert torch.equal(found, torch.ones(2).mul(2).sin() + 1)
        assert "mul" in "".join(code) or "*" in "".join(code)
        assert "sin" not in "".join(code)


IN_COMPILED_CODE = """
    import sys
    import torch
    import torch._dynamo
    import gpipe

    def draw(x):
        return torch.nn.functional.dropout(x) + torch.rand(3)

    found = []
    for function in (draw, torch.compile(draw, backend="eager")):
        with gpipe.rng_scope(1, 2, 3, 4):
            found.append(function(torch.ones(3)))
    assert torch.equal(*found)
    frames = torch._dynamo.utils.counters["frames"]
    print(frames["total"])
"""


def test_a_kernel_is_left_alone_by_compiled_code() -> None:
    with relied_on("untraced", "keys random operations in compiled code"):
        source = textwrap.dedent(IN_COMPILED_CODE)
        done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=170)
        assert done.returncode == 0, done.stderr
        assert int(done.stdout) == 1  # draw, and no kernel


def test_what_the_compiler_wrapped_is_told_apart() -> None:
    layer, inside = nn.Linear(2, 2), nn.Linear(2, 2)
    inside.compile(backend="eager")
    with relied_on("is_compiled", "rejects models that are compiled as a whole"):
        assert modes.is_compiled(inside)
        wrapped: Any = torch.compile(layer, backend="eager")
        assert [modes.is_compiled(module) for module in (layer, wrapped)] == [False, True]
    with relied_on("without_compiler", "recognizes a compiled loss of torch"):
        assert modes.without_compiler(wrapped) is layer
        assert modes.without_compiler(torch.compile(F.mse_loss, backend="eager")) is F.mse_loss
        assert modes.without_compiler(F.mse_loss) is F.mse_loss


# ---- modules, process groups, scalers ----


def test_norms_have_the_classes_that_they_had() -> None:
    norms = [nn.BatchNorm1d(2), nn.BatchNorm3d(2), nn.LazyBatchNorm2d(), nn.SyncBatchNorm(2)]
    with relied_on("AnyBatchNorm", "finds the BatchNorms of a model"):
        assert all(isinstance(norm, modules.AnyBatchNorm) for norm in norms)
        assert not isinstance(nn.LayerNorm(2), modules.AnyBatchNorm)
    with relied_on("check_dimensions", "rejects inputs that a BatchNorm does not accept"):
        modules.check_dimensions(nn.BatchNorm2d(2), torch.ones(1, 2, 3, 3))
        with pytest.raises(ValueError, match="4D"):
            modules.check_dimensions(nn.BatchNorm2d(2), torch.ones(1, 2))


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_an_rnn_uses_the_weights_that_are_put_into_it(kind: Any) -> None:
    with relied_on("refresh_weights_of_rnn", "makes an RNN use shared weights"):
        rnn, x = kind(2, 2), torch.ones(1, 1, 2)
        before = rnn(x)[0]
        rnn._parameters["weight_ih_l0"] = nn.Parameter(rnn.weight_ih_l0.detach() + 1)
        modules.refresh_weights_of_rnn(rnn)
        assert not torch.equal(rnn(x)[0], before)
        modules.refresh_weights_of_rnn(nn.Linear(1, 1))


@pytest.mark.parametrize("kind", [nn.MultiheadAttention, nn.Linear])
def test_what_resets_a_module_is_found(kind: Any) -> None:
    with relied_on("reset_of", "initializes modules on the meta device"):
        module = kind(8, 2)
        before = [tensor.detach().clone() for tensor in module.parameters() if tensor.std() > 0]
        reset = modules.reset_of(module)
        assert reset is not None
        reset()
        after = [tensor for tensor in module.parameters() if tensor.std() > 0]
        assert not torch.equal(before[0], after[0])
        assert modules.reset_of(nn.ReLU()) is None


def test_hooks_of_modules_are_seen() -> None:
    def hook(*_: object) -> None:
        return None

    with relied_on("hooks_of", "searches hooks for state of a layer"):
        layer = nn.Linear(1, 1)
        assert modules.hooks_of(layer) == []
        layer.register_forward_hook(hook)
        layer.register_full_backward_hook(hook)
        layer.register_full_backward_pre_hook(hook)
        assert modules.hooks_of(layer) == [hook] * 3
    with relied_on("is_called_by_forward", "traces a model that calls forward of its blocks"):
        plain, hooked, compiled = (nn.Linear(1, 1) for _ in range(3))
        hooked.register_forward_hook(hook)
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # of torch.jit, by dynamo
            compiled.compile()
        assert [*map(modules.is_called_by_forward, (plain, hooked, compiled))] == [True, False, False]
    with relied_on("count_forward_hooks", "describes a model, so that a changed one is verified again"):
        assert [*map(modules.count_forward_hooks, (plain, hooked))] == [0, 1]
    with relied_on("global_hooks", "restores state that global hooks changed"):
        handle = nn.modules.module.register_module_forward_hook(hook)
        assert hook in modules.global_hooks()
        handle.remove()
        assert hook not in modules.global_hooks()


class Wrapper(Tensor):
    """A tensor that claims to hold other tensors."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return [], None

    @staticmethod
    def __tensor_unflatten__(inner: object, context: object, size: object, stride: object) -> Tensor:
        raise NotImplementedError


def test_tensors_that_hold_others_are_seen() -> None:
    with relied_on("is_wrapper", "rejects tensors that a checkpoint cannot store"):
        assert modules.is_wrapper(torch.ones(1).as_subclass(Wrapper))
        assert not modules.is_wrapper(nn.Parameter(torch.ones(1)))


def test_the_timeout_of_a_group_is_read() -> None:
    with relied_on("seconds_of_group", "uses the timeout of the process group"):
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=77))
        try:
            assert dist.group.WORLD is not None
            assert modules.seconds_of_group(dist.group.WORLD) == 77
        finally:
            dist.destroy_process_group()


def test_the_host_of_the_store_is_read() -> None:
    assert modules.store_host() == ""
    with relied_on("store_host", "finds the address of this host if MASTER_ADDR is not set"):
        for store, host in ((HashStore(), ""), (TCPStore("127.0.0.1", 0, is_master=True), "127.0.0.1")):
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
            try:
                assert modules.store_host() == host
            finally:
                dist.destroy_process_group()


def test_a_scaler_believes_what_is_noted() -> None:
    layer = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(layer(torch.ones(1, 1)).sum()).backward()
    before = layer.weight.detach().clone()
    with relied_on("awaits_unscale", "unscales gradients once"):
        assert modules.awaits_unscale(scaler, optimizer)
        scaler.unscale_(optimizer)
        assert not modules.awaits_unscale(scaler, optimizer)
    with relied_on("found_infinite", "reports infinite gradients to other ranks"):
        assert [bool(found) for found in modules.found_infinite(scaler, optimizer).values()] == [False]
    with relied_on("note_infinite", "makes all ranks skip the same steps"):
        modules.note_infinite(scaler, optimizer, {torch.device("cpu"): torch.ones(())})
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(layer.weight, before)
        assert scaler.get_scale() == 1.0


def test_a_scaler_looks_at_what_a_process_holds() -> None:
    class Spread:
        def __init__(self, grad: Tensor | None) -> None:
            self.grad = grad

    whole, shard = torch.tensor([4.0]), torch.tensor([float("inf"), 2.0])
    spread = type("Gradient", (), {"to_local": lambda _: shard})()
    scaler = modules.LocalGradScaler("cpu", init_scale=2.0)
    optimizer: Any = SimpleNamespace(param_groups=[{"params": [*map(Spread, [whole, spread, None])]}])
    with relied_on("LocalGradScaler", "unscales shards of gradients"):
        scaler.scale(torch.ones(()))
        scaler.unscale_(optimizer)
        assert (whole.item(), shard[1].item()) == (2.0, 1.0)
        assert all(modules.found_infinite(scaler, optimizer).values())


# ---- the dispatcher ----


def test_a_thread_may_go_by_a_key() -> None:
    with relied_on("unused_key", "intercepts random operations"):
        key = dispatcher.unused_key()
    with (
        relied_on("is_key_included", "detects nested random scopes"),
        relied_on("include_key", "enters and leaves a random scope"),
    ):
        assert not dispatcher.is_key_included(key)
        dispatcher.include_key(key, True)
        inside = dispatcher.is_key_included(key)
        dispatcher.include_key(key, False)
        assert inside
        assert not dispatcher.is_key_included(key)
    with relied_on("exclude_key", "runs a random operation below the kernel that intercepted it"):
        dispatcher.exclude_key(key, True)
        left_out = torch._C._dispatch_tls_is_dispatch_key_excluded(key)
        dispatcher.exclude_key(key, False)
        assert left_out
        assert not torch._C._dispatch_tls_is_dispatch_key_excluded(key)
    with (
        relied_on("stash", "stores the random scope of a thread"),
        relied_on("stashed", "finds the random scope of a thread"),
    ):
        kept = object()
        before = sys.getrefcount(kept)
        dispatcher.stash(kept)
        assert dispatcher.stashed() is kept
        assert sys.getrefcount(kept) == before + 1
        dispatcher.stash(None)
        assert sys.getrefcount(kept) == before
    with relied_on("forget_stashed", "clears a thread that ends"):
        dispatcher.stash(kept)
        dispatcher.forget_stashed()
        assert not torch._C._is_key_in_tls(dispatcher.SLOT)
        assert sys.getrefcount(kept) == before


def test_keys_below_are_those_of_torch() -> None:
    with relied_on("keys_below", "redispatches an operation to torch"):
        key = dispatcher.unused_key()
        below = dispatcher.keys_below(key)
        assert not below.has(key)
        assert below.has(torch._C.DispatchKey.AutogradCPU)
        assert below.has(torch._C.DispatchKey.CPU)
    with relied_on("are_below_a_mode", "detects operations that torch decomposes"):
        assert not dispatcher.are_below_a_mode(torch._C._dispatch_keys(torch.ones(1)))
        assert dispatcher.are_below_a_mode(torch._C.DispatchKeySet(torch._C.DispatchKey.Python))


def test_random_operations_are_known() -> None:
    with relied_on("random_operators", "finds the operations to key"):
        names = {operator.name() for operator in dispatcher.random_operators()}
        known = ("rand", "randn", "randperm", "bernoulli", "native_dropout", "normal_", "multinomial", "randint.low")
        assert {f"aten::{name}" for name in known} <= names
        assert not {"aten::add.Tensor", "aten::dropout", "aten::lstm.input"} & names
        assert dispatcher.ATTENTION_ON_CPU not in {name.partition(".")[0] for name in names}
    with relied_on("ATTENTION_ON_CPU", "excludes attention on the CPU, which uses no random numbers"):
        x, (space, _, name) = torch.ones(1, 1, 2, 2), dispatcher.ATTENTION_ON_CPU.partition("::")
        with pytest.raises(RuntimeError, match="dropout > 0"):
            getattr(getattr(torch.ops, space), name)(x, x, x, 0.5)
    with relied_on("arguments_of", "finds the overload that takes a generator"):
        assert dispatcher.arguments_of(torch.ops.aten.bernoulli.default) == ["self", "generator"]
    with relied_on("Operator", "is the type of an operation"):
        assert isinstance(torch.ops.aten.rand.default, torch._ops.OpOverload)


def test_control_flow_passes_a_key() -> None:
    with relied_on("let_control_flow_pass", "lets torch.cond run in a layer"), gpipe.rng_scope(0, 0, 0, 0):
        x = torch.ones(2)
        found = torch.ops.higher_order.cond(torch.tensor(True), lambda x: (x + 1,), lambda x: (x,), (x,))
        assert torch.equal(found[0], x + 1)


def test_generators_are_told_apart() -> None:
    with relied_on("is_one_generator", "treats torch's default generator like no generator"):
        assert dispatcher.is_one_generator(torch.default_generator, torch.default_generator)
        assert not dispatcher.is_one_generator(torch.Generator(), torch.default_generator)


# ---- torch.utils.checkpoint ----


def frames_seen() -> list[CheckpointFrame]:
    frame, found = inspect.currentframe(), []
    while frame is not None:
        seen = checkpoints.read_checkpoint(frame)
        found += [] if seen is None else [seen]
        frame = frame.f_back
    return found


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("preserves", [True, False])
def test_checkpoints_show_what_they_noted(reentrant: bool, preserves: bool) -> None:
    forward_and_recompute: list[list[CheckpointFrame]] = []
    in_backward: list[list[CheckpointFrame]] = []

    def layer(x: Tensor) -> Tensor:
        forward_and_recompute.append(frames_seen())
        made = x * torch.rand(2)
        if made.requires_grad:
            made.register_hook(lambda gradient: in_backward.append(frames_seen()))
        return made.sin()

    told = "has a recompute draw what its forward drew"
    with relied_on("read_checkpoint", told), relied_on("CheckpointFrame", told):
        x, state = torch.ones(2, requires_grad=True), torch.get_rng_state()
        checkpoint(layer, x, use_reentrant=reentrant, preserve_rng_state=preserves).sum().backward()
        (forward,), (recompute,) = forward_and_recompute
        assert (forward.recomputes, forward.preserves, recompute.recomputes) == (False, preserves, True)
        for seen in (forward, recompute):
            noted = seen.state(torch.device("cpu"))
            assert torch.equal(noted, state) if preserves and noted is not None else noted is None
            assert seen.state(torch.device("cuda", 0)) is None
        assert in_backward in ([[]], [[], []])  # what runs behind a recompute is none


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_can_be_told_to_leave_the_default_generator_alone(reentrant: bool) -> None:
    drawn = []

    def layer(x: Tensor) -> Tensor:
        for seen in frames_seen():
            seen.release()
        drawn.append(torch.rand(1))
        return x.sin()

    with relied_on("read_checkpoint", "does not change the default generator for other threads"):
        x = torch.ones(2, requires_grad=True)
        checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
        assert len(drawn) == 2
        assert not torch.equal(*drawn)


def codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


def test_compiled_recomputes_are_known() -> None:
    with relied_on(
        "reruns_by_default_generator", "rejects random numbers that a compiler's recomputation would not repeat"
    ):
        assert rng_prims.__file__ is not None
        every = codes(compile(Path(rng_prims.__file__).read_text(), rng_prims.__file__, "exec"))
        known = [code.co_name for code in every if checkpoints.reruns_by_default_generator(code)]
        assert {"impl_cpu", "impl_cuda"} <= set(known)
    with relied_on("is_of_checkpoints", "skips frames of other code"):
        assert checkpoints.is_of_checkpoints(CheckpointFunction.forward.__code__)
        assert not checkpoints.is_of_checkpoints(codes.__code__)


def test_the_threads_of_an_operation_are_put_back() -> None:
    before = torch.get_num_threads()
    with relied_on("intra_op_threads", "gives every rank the same number of threads"):
        with modes.intra_op_threads(before + 1):
            assert torch.get_num_threads() == before + 1
        assert torch.get_num_threads() == before


def test_what_fully_shard_does_behind_a_backward_is_done_when_it_is_called() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        module: Any = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)))
        with relied_on("settings_of", "controls gathering and reduction during steps"):
            put_back = modules.settings_of(module)
            module.set_requires_gradient_sync(False)
            module.set_reshard_after_backward(False)
            module(torch.ones(1, 2)).sum().backward()
            assert not any(isinstance(parameter, DTensor) for parameter in module.parameters())
            put_back()
        with relied_on("gradients_of", "sums the gradients of a mini-batch over replicas"):
            found: Any = modules.gradients_of(module)
            assert all(torch.equal(gradient, torch.ones_like(gradient)) for gradient, _ in found)
            assert [(gradient.dim(), axis) for gradient, axis in found] == [(2, 0), (1, 0)]
        with relied_on("end_backwards", "sums the gradients of a mini-batch over replicas"):
            modules.end_backwards(module)
            (weight, _) = module.parameters()
            assert isinstance(weight.grad, DTensor)
            assert torch.equal(weight.grad.to_local(), torch.ones(2, 2))
        with relied_on("carry_gradients", "accumulates into earlier gradients like the reference loop"):
            module.unshard()
            assert modules.carry_gradients(module)[0] is weight
            assert torch.equal(module.weight.grad, torch.ones(2, 2))
        with relied_on("break_off", "resets modules after a failed step"):
            module.register_forward_hook(lambda *_: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                module(torch.ones(1, 2))
            modules.break_off(module)
            module.reshard()
            assert all(isinstance(parameter, DTensor) for parameter in module.parameters())
    finally:
        dist.destroy_process_group()
