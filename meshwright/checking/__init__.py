"""Implements `meshwright check`, which compares the programs of a repository with golden records.

`settings` reads what pyproject.toml declares. `processes` starts a process for each program, and
`worker` makes its record there. `owned_by_tests` asks pytest for the goldens of tests. `drawing`,
`markdown` and `document` show the answer, and `pull_request` posts it as a comment. `history`
compares each commit with the commit before. `commits` asks git, and `opened` lists the files that a
program reads.
"""
