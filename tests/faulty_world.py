"""A corridor in a worker process, with tasks that hang it, kill it, or walk on. Light: workers import this alone."""

import os
import signal
import time


class FaultyCorridor:
    """An Env: the third step of a task named "hang…" takes a minute, that of "die…" kills the process."""

    def reset(self, task, seed):
        self.task, self.at = task, 0
        return f"You are at 0 of {task.data['goal']}.", {"admissible": ["go left", "go right"], "success": False}

    def step(self, action):
        self.at += 1
        if self.at == 3 and self.task.id.startswith("hang"):
            time.sleep(60)
        if self.at == 3 and self.task.id.startswith("die"):
            os.kill(os.getpid(), signal.SIGKILL)
        won = self.at == self.task.data["goal"]
        info = {"admissible": ["go left", "go right"], "success": won}
        return f"You are at {self.at} of {self.task.data['goal']}.", float(won), won, False, info

    def close(self):
        pass
