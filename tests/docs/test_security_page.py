"""The page on TLS: its commands make certificates that are taken, and its files are those that it names."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from gpipe.distributed.tls import CA, CERT, KEY, VARIABLES, identity
from tests.docs.pages import ROOT, blocks_of
from tests.support.certificates import REASON, set_files

PAGE = ROOT / "docs" / "how-to" / "encrypt-traffic.md"
BLOCKS = blocks_of(PAGE)
SHELL = [block.text for block in BLOCKS if block.language == "sh"]
CLUSTER = ("gpipe", "torchrun", "sbatch", "kubectl")  # what needs other hosts, or says what another test asks


@pytest.mark.skipif(bool(REASON), reason=REASON)
def test_its_commands_make_certificates_that_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [command for block in BLOCKS for command in block.commands]
    known = {*CLUSTER, "umask", "openssl", "rm", "export"}
    assert {shlex.split(line)[0] for line in lines} == known
    own = [line for line in lines if shlex.split(line)[0] not in CLUSTER and "$HOME" not in line]
    shown = "\n".join([*own, *(f'echo "${name}"' for name in VARIABLES)])
    ended = subprocess.run(["bash", "-e", "-c", shown], cwd=tmp_path, check=True, capture_output=True, text=True)
    files = dict(zip(VARIABLES, ended.stdout.splitlines()[-3:], strict=True))
    set_files(monkeypatch, files)
    assert identity() is not None
    assert files == {
        name: str(tmp_path / file) for name, file in ((CERT, "rank.pem"), (KEY, "rank.key"), (CA, "ca.pem"))
    }
    assert sorted(os.listdir(tmp_path)) == ["ca.pem", "rank.key", "rank.pem"]  # nobody makes another one
    assert (tmp_path / "rank.key").stat().st_mode & 0o077 == 0


def test_files_and_variables_are_the_same_for_all_launchers() -> None:
    (yaml,) = [block.text for block in BLOCKS if block.language == "yaml"]
    for name, file in ((CERT, "rank.pem"), (KEY, "rank.key"), (CA, "ca.pem")):
        assert f"{{name: {name}, value: /tls/{file}}}" in yaml
        assert f"{name}=$PWD/{file}" in "".join(SHELL)
        assert f"{name}=$HOME/job/{file}" in "".join(SHELL)
        assert f"--from-file={file}" in "".join(SHELL)
    secret = re.search(r"create secret generic (\S+)", "".join(SHELL))
    assert secret is not None
    assert f"secretName: {secret[1]}," in yaml
