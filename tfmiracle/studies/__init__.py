"""The replication of the paper: grids of runs, their records and reports."""
