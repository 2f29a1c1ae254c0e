"""A run as it was recorded, or as it goes on.

table, index           a recorded run as one table of columns, and the file that keeps them
models, model_stats    models made again on demand, and what they say of versions and updates
devices                each device's figures, and which devices stand out
charts, pictures       charts of the pages (uPlot), and of files (matplotlib)
timeline, observer     a run as its streams tell it
record                 a run's folder as Python sees it
ui                     `fedstream ui`: a recorded run in the browser
live                   a run as it is now, in the browser
"""
