"""A run as it is now, in the browser: served by the coordinator while somebody looks.

scene              all that the page shows of one moment, as values
collector          makes scenes of what Redis has, with the coordinator's own rights
broadcast          one collector for all viewers; it rests while there is none
server             routes, the stream of changes, who may see and who may act
"""
