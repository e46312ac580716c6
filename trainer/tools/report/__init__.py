"""`report.html`: a run folder as one HTML page."""
