"""verl's own tests, run with their imports changed: `python -m tests.verl_suite CHECKOUT`.

`names` says what each imported name is here, `stand_ins` has what only the tests need, and
`__main__` runs the files. None of verl's code is kept here: the checkout is the caller's.
"""
