"""Implements `meshwright radar`, which compiles programs with several releases of jax.

`releases` reads which releases the user names, and `environments` installs each in a folder.
`sweep` records every program in every environment. `steps` says what each release changed, and
`notes` finds the release notes about it. `summary` counts the changes, and `drawing`, `page` and
`document` show the answer.
"""
