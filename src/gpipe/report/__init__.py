"""Pictures and tables of timelines: pure functions from what happened to text."""

from gpipe.report.lanes import lanes_text
from gpipe.report.page import report_html
from gpipe.report.picture import typical_svg, write_picture
from gpipe.report.stored import Report, read_report, report_json
from gpipe.report.svg import timeline_svg, timelines_svg
from gpipe.report.table import breakdown_lines, percentages
from gpipe.report.trace import trace_json

__all__ = [
    "Report",
    "breakdown_lines",
    "lanes_text",
    "percentages",
    "read_report",
    "report_html",
    "report_json",
    "timeline_svg",
    "timelines_svg",
    "trace_json",
    "typical_svg",
    "write_picture",
]
