"""The suites of bench/run.py, one file each: `case` runs in a fresh process, `suite` is the loop over cases, `table` the text."""
