"""The report: one HTML page with figures and tables, from records, trials and result files.

`sources` reads what there is; `comparisons`, `models`, `calls` and `studies` make rows of it;
`models` and `*_figures` draw the rows with Altair, and `page` writes the page.
"""
