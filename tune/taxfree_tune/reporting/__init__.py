"""The report: one HTML page with figures and tables, from records, trials and result files.

`sources` reads what there is, `comparisons`, `accounts`, `studies` and `calls` make rows of it,
`figures` draws the rows with Altair, and `page` writes the page.
"""
