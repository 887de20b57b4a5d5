"""Turn logits into tokens, and tokens into text: sampling, structured outputs, beams, stop strings.

Nothing here knows pages or schedules.
"""
