"""`meshwright check`: the golden records of a repository, compared with its present programs.

`settings` reads what pyproject.toml declares, `worker` makes the record of one program in a process
of its own, `processes` starts these, `owned_by_tests` asks pytest for the goldens of tests, and
`drawing`, `markdown` and `document` show the answer. `pull_request` comments it. `history` compares
each commit of a range with the one before; `commits` has what git knows, and `opened` which files a
program reads.
"""
