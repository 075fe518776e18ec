"""First contact with a GPU: `python -m benchmarks.gpu.contact --budget 320 --out DIR`.

`sections.py` has what runs, `scheduler.py` decides when (pure), `children.py` and `keeper.py` run processes and end
them with all that they started, `runner.py` carries the decisions out, `output.py` and `summary.py` are the files and
what is printed. All of it needs Python alone: a machine whose torch cannot be imported still gets its report.
"""
