"""The commands of the command line: each module has `Arguments`, whose docstrings are the help, and `run`.

A module may also have `defaults`, which finds the arguments that flags override. Heavy imports live inside `run`.
"""
