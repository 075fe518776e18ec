"""`disagg plan` and `disagg calibrate`, and the files that they read."""
