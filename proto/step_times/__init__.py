"""The time of an engine step: one fit, made by workers and by routers."""
