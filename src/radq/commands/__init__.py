"""The commands of the command line: each module has `Arguments`, whose docstrings are the help, and `run`.

Heavy imports live inside `run`.
"""
