"""`report.html`: a run folder as one page."""
