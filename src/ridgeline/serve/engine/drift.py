"""Notice that steps take another time than the calibration predicts, and say so once."""

from __future__ import annotations

from dataclasses import dataclass

WINDOW_S = 5.0  # seconds of steps that one ratio is made of
FACTOR = 1.5  # predictions this far off are a drift; whole runs are within it on the machine of the calibration
WINDOWS = 3  # in a row, so that another program for some seconds is none
SHORT_S = 0.005  # mean of predicted steps, below which the host's work with texts is a large part of a step


@dataclass(slots=True)
class Drift:
    """Compares measured with predicted steps.

    A prediction leaves out the host's work with texts. Where steps are short, they are compared with those of the first
    window instead.

    ratio: measured time of the last window of steps, divided by its predicted time; 0 before the first window.
    """

    ratio: float = 0.0
    _usual: float = 0.0  # ratio that is no drift; 0 before the first window
    _measured_s: float = 0.0
    _predicted_s: float = 0.0
    _steps: int = 0
    _off: int = 0  # windows in a row that say the other thing
    _said: bool = False

    def add(self, measured_s: float, predicted_s: float) -> str | None:
        """Count one step. Return a line for the log when a drift is found, and when it has ended."""
        if predicted_s <= 0:
            return None
        self._measured_s += measured_s
        self._predicted_s += predicted_s
        self._steps += 1
        return self._end_window() if self._measured_s >= WINDOW_S else None

    def _end_window(self) -> str | None:
        self.ratio, step_s = self._measured_s / self._predicted_s, self._predicted_s / self._steps
        self._measured_s, self._predicted_s, self._steps = 0.0, 0.0, 0
        if not self._usual:
            self._usual = max(self.ratio, 1.0) if step_s < SHORT_S else 1.0
        is_off = not 1 / FACTOR <= self.ratio <= FACTOR * self._usual
        self._off = self._off + 1 if is_off != self._said else 0
        if self._off < WINDOWS:
            return None
        self._said, self._off = is_off, 0
        if not is_off:
            return "steps take about as long as the calibration predicts again"
        return (
            f"steps take {self.ratio:.2g} times as long as the calibration predicts: another program uses this "
            "machine, its clock changed, or the calibration is too old; when it is idle, run `ridgeline calibrate` and "
            "start again"
        )
