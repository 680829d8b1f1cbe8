"""`import gpipe` loads nothing; what is public resolves on first use; compiled code goes around a pipe."""

import subprocess
import sys
import textwrap

import pytest

import gpipe


def run_python(source: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(source)], capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_gpipe_loads_neither_torch_nor_numpy() -> None:
    loaded = run_python(
        """
        import sys
        before = set(sys.modules)
        import gpipe
        dir(gpipe), gpipe.__all__, gpipe.__doc__
        print(*sorted({name.split(".")[0] for name in set(sys.modules) - before}))
        """
    ).split()
    assert "gpipe" in loaded
    assert not {"torch", "numpy", "safetensors", "tyro", "rich"} & set(loaded)


def test_plan_loads_no_torch() -> None:
    assert (
        run_python(
            """
        import sys
        import gpipe.schedule.schedules, gpipe.schedule.lower, gpipe.schedule.simulate, gpipe.schedule.timeline
        print("torch" in sys.modules)
        """
        )
        == "False"
    )


def test_public_names_resolve_and_are_listed() -> None:
    for name in gpipe.__all__:
        assert getattr(gpipe, name) is not None
        assert name in dir(gpipe)
    assert callable(gpipe.models.amoebanet_d)
    assert "models" in dir(gpipe)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'gpipe' has no attribute 'GPipee'"):
        _ = gpipe.GPipee  # type: ignore[attr-defined]  # there is none


def test_every_public_name_has_a_docstring_with_an_example() -> None:
    for name in gpipe.__all__:
        assert ">>>" in (getattr(gpipe, name).__doc__ or ""), name


COMPILES = """
    import sys
    import torch
    from torch.nn.functional import mse_loss
    import gpipe

    def make():
        torch.manual_seed(1)
        layers = [torch.nn.Linear(3, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 2)]
        return gpipe.GPipe(layers, 3, 2, seed=0)

    x, y = torch.randn(4, 3), torch.randn(4, 2)
    before = "torch._dynamo" in sys.modules
    plain = make()
    plain.step(x, y, mse_loss)
    plain(x).sum().backward()
    print("loads nothing" if "torch._dynamo" not in sys.modules or before else "loads the compiler")

    import warnings
    warnings.simplefilter("ignore")  # the compiler's own
    graphs = []

    def counting(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def call(pipe, x, y):
        return mse_loss(pipe(x * 2) + 1, y)

    def step(pipe, x, y):
        return pipe.step(x * 2, y + 1, mse_loss) * 3

    compiled, plain = make(), make()
    for _ in range(2):
        losses = [torch.compile(call, backend=counting)(compiled, x, y), call(plain, x, y)]
        for loss in losses:
            loss.backward()
        losses += [torch.compile(step, backend=counting)(compiled, x, y), step(plain, x, y)]
        assert torch.equal(losses[0], losses[1]) and torch.equal(losses[2], losses[3])
    for p, q in zip(compiled.parameters(), plain.parameters()):
        assert torch.equal(p.grad, q.grad)
    assert torch.equal(torch.compile(make(), backend=counting)(x), make()(x))
    print("the same bits")
    code = [str(node.target) for graph in graphs for node in graph.graph.nodes if node.op.startswith("call")]
    print("traces layers" if any("linear" in name or "dropout" in name for name in code) else "traces none")
"""


def test_a_pipe_loads_no_compiler_and_runs_as_it_is_in_a_compiled_function() -> None:
    """One interpreter for all of it: loading torch and its compiler takes seconds."""
    assert run_python(COMPILES).splitlines() == ["loads nothing", "the same bits", "traces none"]
