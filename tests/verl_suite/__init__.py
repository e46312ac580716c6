"""verl's own tests, run with their imports changed: `python -m tests.verl_suite CHECKOUT`.

`names` maps each imported name to ours, `stand_ins` creates whatever else the tests need (inputs,
names of devices), and `__main__` runs the files. The repository has none of verl's code: you supply
the checkout.
"""
