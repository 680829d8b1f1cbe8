"""Pictures and tables of timelines: pure functions from what happened to text."""

from gpipe.report.lanes import lanes_text
from gpipe.report.svg import timeline_svg, timelines_svg
from gpipe.report.table import breakdown_lines, percentages
from gpipe.report.trace import trace_json

__all__ = ["breakdown_lines", "lanes_text", "percentages", "timeline_svg", "timelines_svg", "trace_json"]
