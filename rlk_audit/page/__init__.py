"""The page: a run as one HTML file that needs nothing else, made by ``page_html`` and ``write_page``."""

from rlk_audit.page.write import page_html as page_html
from rlk_audit.page.write import write_page as write_page
