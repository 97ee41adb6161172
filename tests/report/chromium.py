"""A browser without a window, for the page of a report. Needs selenium, Chromium and its driver."""

import contextlib
import shutil

ARGUMENTS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip


def missing():
    """What keeps Chromium from being started here; empty if nothing does."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed: pip install -e '.[dev]'"
    programs = {"chromium": _chromium(), "chromedriver": shutil.which("chromedriver")}
    lacking = [name for name, path in programs.items() if path is None]
    return f"{' and '.join(lacking)} not found: apt-get install chromium chromium-driver" if lacking else ""


@contextlib.contextmanager
def chromium(profile, *, width=1366, height=768):
    """A started browser with an empty profile folder; its console is kept."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = _chromium()
    for argument in (*ARGUMENTS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        # A window's own frame takes some of its size, even where none is seen.
        driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
        )
        yield driver
    finally:
        driver.quit()


def opened(driver, path, *, seconds=30):
    """Opens a page and waits until its first rollouts are shown; returns the milliseconds that took in the browser."""
    from selenium.webdriver.support.wait import WebDriverWait

    driver.get(path.resolve().as_uri())
    WebDriverWait(driver, seconds, poll_frequency=0.05).until(
        lambda page: page.execute_script("return document.documentElement.dataset.ready === 'true'")
    )
    return driver.execute_script("return performance.getEntriesByName('report-ready')[0].startTime")


def complaints(driver):
    """What the console holds: errors of scripts, refusals of the page's policy, missing files."""
    return [entry["message"] for entry in driver.get_log("browser")]


def _chromium():
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
