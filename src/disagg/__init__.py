"""disagg: a disaggregated prefill/decode serving cluster for large language models.

The code folders of the repository are sub-packages of this one: `disagg.router` is `router/` and so on, by relative
links.
"""

__version__ = "0.1.0"
