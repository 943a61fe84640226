"""The commands of the command line, one module each, with `Arguments`, whose docstrings are the help, and `run`.

A module may also have `defaults`, which reads the defaults of the options, for example from a YAML file. Heavy imports
stand inside `run`, so that help is shown at once.
"""
