"""Load tests of whole clusters: single points, sweeps, and comparisons of shapes."""
