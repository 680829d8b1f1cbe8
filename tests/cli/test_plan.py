"""`gpipe plan`, which plans a network by name or by a function of the user's."""

from pathlib import Path

import pytest

from gpipe.cli.main import main
from gpipe.planner.search.device import PRESETS

SMALL = ("--size", "layers=2", "model_dim=64", "ffn_dim=64", "heads=2", "vocab=50", "--batch", "8")


@pytest.fixture(autouse=True)
def _terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def test_a_network_by_name_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "transformer_lm", *SMALL, "--devices", "2xtpuv2", "1x16x9.3x12", "-k", "2"])
    out = capsys.readouterr().out
    assert out.startswith("K=2 M=")
    assert "rank 1 (tpuv2): " in out
    assert "rejected (slower)" in out
    main(["plan", "transformer", "--size", "layers=1", *SMALL[2:], "--devices", "2xtpuv2", "-k", "2"])  # two inputs
    assert capsys.readouterr().out.startswith("K=2 M=")


def test_fast_copies_to_the_host_replace_recomputation(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("layers=6", "model_dim=64", "ffn_dim=256", "heads=2", "vocab=50")
    for bandwidth, remat in (("0", "remat 3"), ("300", "remat offload")):
        fixed = ("-k", "2", "-m", "8", "--schedule", "gpipe", "--batch", "16", "--devices", "2x0.1x1x1")
        main(["plan", "transformer_lm", "--size", *sizes, *fixed, "--host-bandwidth", bandwidth])
        assert capsys.readouterr().out.count(remat) == 2


def test_a_function_of_the_users_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "import torch\ndef net():\n    return [torch.nn.Linear(4, 4)] , torch.ones(4, 4)\n"
    (tmp_path / "own_net.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    main(["plan", "own_net:net", "--devices", "t4", "--batch", "4"])
    assert "rank 0 (t4): 0, remat never" in capsys.readouterr().out


def test_what_cannot_be_ends_with_status_2_and_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, text in (
        ("resnet", "MODEL: resnet is not a model. Choose one of amoebanet_d,"),
        ("unet --batch 0", "--batch: 0 is out of range. Choose at least 1."),
        ("unet --batch 8 -m 3", "micro_batches=3 does not divide global_batch=8"),
        ("unet --schedule zbv", "--schedule: zbv is not a schedule. Choose one of gpipe, 1f1b"),
        ("unet --size b", "--size: b is not NAME=INT"),
        ("unet --devices 4xtpu", "'4xtpu' does not describe devices. Use COUNTxPRESET"),
        ("unet --devices 2x1x1", "2 devices without a link. Use 1x2x1x1 or 2x1x1xGB"),
        ("unet --devices 0xv100", "'0xv100' has no device"),
        ("unet --devices 99999999xtpuv2", "'99999999xtpuv2' has more than 1,000 devices"),
        (f"unet --devices {'9' * 5000}xtpuv2", "has more than 1,000 devices"),
        ("os:system", "MODEL: os:system cannot be called without arguments"),
        ("gpipe:find_plan", "MODEL: gpipe:find_plan cannot be called without arguments"),
        ("unet --devices 1.5x1x1x1", "'1.5x1x1x1' begins with 1.5"),
        ("unet --devices 2xnanx1x1", "'2xnanx1x1' does not describe devices"),
        ("unet --devices 2x1x1x1x1", "'2x1x1x1x1' does not describe devices"),
        ("unet --devices 2x0x1x1", "memory=0.0 is not positive"),
        ("unet --optimizer-numbers nan", "--optimizer-numbers: nan is out of range"),
        ("unet --optimizer-numbers -1", "--optimizer-numbers: -1.0 is out of range"),
        ("unet --host-bandwidth -1", "--host-bandwidth: -1.0 is out of range"),
        ("unet --size depth=3", "--size: unet has no argument depth. Choose from b, c, inputs, outputs, dropout."),
        ("transformer_lm --size heads=0", "--size: heads=0 is out of range"),
        ("mine:", "MODEL: mine: lacks a module or function"),
        (":net", "MODEL: :net lacks a module or function"),
        ("nosuch:f", "MODEL: nosuch:f: No module named 'nosuch'. Pass MODULE:FUNCTION"),
        ("math:tau --size b=1", "--size: cannot be combined with math:tau"),
        ("unet -k 9", "partitions=9 exceeds the number of devices. Use 1 to 4."),
        ("unet --devices", "--devices: got no device"),
        ("math:tau", "MODEL: math:tau is not a function"),
        ("time:localtime", "MODEL: time:localtime returned struct_time"),
        ("gpipe:nothing", "nothing"),
        ("unet --batch 0 --schedule bar --devices 2xfoo", "Choose at least 1. --schedule: bar is not a schedule"),
        ("unet --batch 0 --schedule bar --devices 2xfoo", "auto. --devices: '2xfoo' does not describe devices"),
        (f"transformer_lm {' '.join(SMALL)} --devices 1x0.00001x1x1", "[nothing-fits]"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["plan", *arguments.split()])
        assert ended.value.code == 2
        assert text in " ".join(capsys.readouterr().err.split())


def test_help_lists_the_presets_and_fits_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    out = capsys.readouterr().out
    assert all(len(line) <= 80 for line in out.splitlines())
    assert all(name in " ".join(out.replace("│", " ").split()) for name in PRESETS)


def test_a_plan_says_for_which_sample_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "transformer_lm", *SMALL, "--devices", "2xtpuv2", "-k", "2"])
    assert capsys.readouterr().out.endswith("\nThe sample has rows of 1024 int64.\n")


def test_weights_are_planned_on_the_host_within_its_memory(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("layers=12", "model_dim=64", "ffn_dim=256", "heads=2", "vocab=50")
    fixed = ("transformer_lm", "--size", *sizes, "--batch", "4", "-m", "4", "--devices", "1x0.05x1x1")
    main(["plan", *fixed, "--weights", "host", "--host-bandwidth", "12"])
    assert "weights on the host: " in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["plan", *fixed, "--weights", "host", "--host-bandwidth", "12", "--host-memory", "0.001"])
    assert "host needs" in " ".join(capsys.readouterr().err.split())
