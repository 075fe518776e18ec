"""Load tests of whole clusters: points, sweeps, shapes beside each other."""
