"""A browser without a window, for the page of a report. Needs selenium, Chromium and its driver."""

import contextlib
import shutil

ARGUMENTS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip


PANEL = '[data-title="Training accuracy"]'


def missing():
    """Returns why Chromium cannot be started, or an empty text."""
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
        # The frame of a window takes some of its size, even without a display.
        driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
        )
        yield driver
    finally:
        driver.quit()


def opened(driver, path, *, seconds=30):
    """Opens a page and waits for its first rollouts; returns the milliseconds in the browser."""
    from selenium.webdriver.support.wait import WebDriverWait

    driver.get(path.resolve().as_uri())
    WebDriverWait(driver, seconds, poll_frequency=0.05).until(
        lambda page: page.execute_script("return document.documentElement.dataset.ready === 'true'")
    )
    return driver.execute_script("return performance.getEntriesByName('report-ready')[0].startTime")


def complaints(driver):
    """Returns the messages of the console: errors of scripts, violations of the policy, missing files."""
    return [entry["message"] for entry in driver.get_log("browser")]


def _chromium():
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Shown:
    """Actions of a reader on the page."""

    def __init__(self, driver):
        self.driver = driver

    def all(self, selector):
        return self.driver.find_elements("css selector", selector)

    def one(self, selector):
        return self.driver.find_element("css selector", selector)

    def texts(self, selector):
        return [each.text for each in self.all(selector)]

    def click(self, selector):
        def clicked():
            self.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", self.one(selector))
            self.one(selector).click()
            return True

        self.until(clicked)  # an element that was replaced takes no click

    def focus(self, selector):
        self.driver.execute_script("arguments[0].focus()", self.one(selector))

    def press(self, *keys):
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def until(self, true):
        """Waits until `true()`; elements may be replaced meanwhile."""
        from selenium.common.exceptions import StaleElementReferenceException
        from selenium.webdriver.support.wait import WebDriverWait

        waiting = WebDriverWait(
            self.driver, 60, poll_frequency=0.02, ignored_exceptions=[StaleElementReferenceException]
        )
        return waiting.until(lambda _: true())

    def lines(self):
        """The paths of one panel."""
        return [each.get_attribute("d") for each in self.all(f"{PANEL} .line")]

    def kinds(self):
        """Returns the shades of the tokens of the first response."""
        tokens = self.all(".response:first-of-type .tokens .token")
        return [each.get_attribute("class").split()[1] for each in tokens]

    def status(self):
        return self.one(".status").text

    def choose(self, label, value, within="main"):
        from selenium.webdriver.support.select import Select

        for field in self.all(f"{within} label.field"):
            if field.text.startswith(label):
                Select(field.find_element("css selector", "select")).select_by_value(value)
                return
