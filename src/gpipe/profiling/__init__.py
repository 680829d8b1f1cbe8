"""Shows recorded steps as text, pictures and an HTML page: time, memory, and possible improvements."""

from gpipe.profiling.breakdown import breakdown_lines, percentages
from gpipe.profiling.lanes import lanes_text
from gpipe.profiling.page import report_html
from gpipe.profiling.stored import Report, read_report, report_json, trace_json
from gpipe.profiling.svg import timeline_svg, timelines_svg, typical_svg, write_picture

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
