"""The page on versions names the formats of files as the files do."""

import re

from gpipe.checkpoint.manifest import FORMAT as CHECKPOINT
from gpipe.checkpoint.manifest import VERSION
from gpipe.profiling.messages import SCHEMA
from gpipe.profiling.stored import FORMAT as REPORT
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "reference" / "versioning.md").read_text()


def test_formats_are_those_that_files_name() -> None:
    table = PAGE.partition("| file | names itself |")[2].partition("\n\n")[0]
    told = [cells.split(" | ")[1] for cells in re.findall(r"^\| .* \|$", table, re.MULTILINE)]
    assert told[:3] == [
        f"`{CHECKPOINT}`, version {VERSION}",
        f"`{REPORT}`",
        f"`{SCHEMA['schema']}`, version {SCHEMA['version']}",
    ]


def test_the_page_says_that_nothing_is_deprecated_while_nothing_warns_of_it() -> None:
    source = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    warns = re.search(r"\b(FutureWarning|DeprecationWarning)\b", source) is not None
    assert ("Nothing is deprecated today" in PAGE) is not warns
