"""The tools of bench.py: measurements, tables, and the comparison with other engines."""
