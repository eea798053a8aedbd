"""A real browser without a screen, for the status page: Debian's chromium and chromium-driver."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

TIMEOUT = 15.0
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")


class Browser:
    def __init__(self, driver: Chrome) -> None:
        self.driver = driver

    def open(self, url: str, width: int = 1280, height: int = 900, scheme: str = "light") -> None:
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        self.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.driver.get(url)

    def command(self, name: str, **parameters: Any) -> Any:
        return self.driver.execute_cdp_cmd(name, parameters)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def press(self, keys: str) -> None:
        self.driver.switch_to.active_element.send_keys(keys)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def until(self, condition: Callable[[], Any]) -> Any:
        """Ask again and again until it is true; what it returned then."""
        return WebDriverWait(self.driver, TIMEOUT, poll_frequency=0.05).until(lambda _: condition())

    def leave(self) -> None:
        """Off the page, whose daemon is about to go, and which would complain of that."""
        self.driver.get("about:blank")
        self.complaints()

    def complaints(self) -> list[str]:
        """Errors of its console since the last call: failed scripts, what the policy forbade, HTTP errors."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]


@contextmanager
def browser() -> Iterator[Browser]:
    options = ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--no-first-run"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options=options, service=ChromeService(DRIVER))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
