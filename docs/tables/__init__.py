"""Write measured tables into README.md and docs/**/*.md from benchmarks/results/*.json.

``python -m docs.tables`` replaces each block ``<!-- table: NAME -->`` … ``<!-- /table -->`` by the
table of that name; ``--check`` only compares. No figure is typed by hand. A module has the tables
of one topic, and lists them in ``TABLES`` with the result that each is made of.
"""
