"""What bench.py measures with: tables, the comparison with other engines, and how each of them is run."""
