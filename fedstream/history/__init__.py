"""A run as it was recorded, or as it goes on.

table, index           a recorded run as one table of columns, and the file that keeps them
models, model_stats    models rebuilt on demand, and their figures of versions and updates
devices                each device's figures, and which devices stand out
charts, pictures       charts of the pages (uPlot), and of files (matplotlib)
timeline, observer     a run as its streams show it
record                 a run's folder as a Python object
ui                     `fedstream ui`: a recorded run in the browser
live                   a run as it is now, in the browser
"""
