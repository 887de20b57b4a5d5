"""Answer what-if questions from a config: plans, comparisons, limits, reports and pictures. No model runs here."""
