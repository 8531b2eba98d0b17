"""Train DFlash drafters: from raw chat data to a drafter that serving engines load.

The folders follow the data::

    sources -> conversations -> responses -> tokens -> features -> drafter -> export -> speculation
                    |               |          |          |           |                      |
                    +--- chat ------+----------+          +- training-+       benchmarks ----+
                                    +---------- target ---+
"""
