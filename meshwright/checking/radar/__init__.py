"""`meshwright radar`: the programs of a repository compiled with several releases of jax.

`releases` reads which releases are asked for, `environments` installs each of them in a folder,
`sweep` records every program in every environment, `steps` says what each release changed,
`notes` finds what its release notes say of it, `summary` counts, and `drawing`, `page` and
`document` show the answer.
"""
