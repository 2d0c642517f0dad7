"""`qarl bench schemes`: what is deployed, per scheme, learner and objective, over seeds.

`grid`        which runs, and what is refused before the first
`cell`        one of them, in a process of its own: train, export, answer held-out problems in a fresh engine
`measure`     all of them, some at a time, found again and continued by the same command
`statistics`  means, bootstrap intervals, paired differences
`table`       the same for a person, as JSON and as plots
`command`     all of it, in order
"""
