"""A recorded run in the browser: its versions, updates and devices, and each version's making.

From what is read to what is shown:

    columns, rows      the journal's versions and updates as arrays; reading them
    index              a file that keeps them
    ahead              a process that makes it while this one starts
    past, portraits      models made again on demand; what they say of one version
    run                all that a page may ask about one run
    directions         what all models say of each device, measured when asked
    devices, charts    figures of each device; curves and bars
    thinning           fewer points for a curve
    questions          what takes a replay to answer: bisection, another rule
    jobs, work         one question at a time, in a process of its own
    pages, answers     HTML, from ``templates/`` and ``static/``
    asking             routes of the questions
    guard, files       headers, hosts and origins; what comes with the pages
    live               a run as it is now, served by its coordinator
    server             `fedstream ui`: all routes, on this machine only
    single             `fedstream report --html`: the same in one file
"""
