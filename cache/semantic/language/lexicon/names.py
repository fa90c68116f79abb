"""Names that chat users write in lower case: countries, nationalities, large cities, languages, products.

Each form stands for one name, so that "us" (written US), "usa" and "america" are one; a nationality or language is not
its country.
"""

from cache.semantic.language.lexicon import words

_ONE_NAME = """
    usa america
    uk britain
    uae
    newyork nyc
    southkorea korea
    netherlands holland
    czechia
    turkey türkiye
    javascript js
    typescript ts
    golang
    postgresql postgres
    kubernetes k8s
    macos osx
    whatsapp
    facebook fb
    youtube yt
    mcdonalds mcdonald's
    paracetamol acetaminophen tylenol
"""

_NAMES = """
    http https
    newyork newzealand newjersey newmexico neworleans newdelhi newhampshire newengland southkorea northkorea
    southafrica saudiarabia sanfrancisco sandiego hongkong afghanistan albania algeria angola argentina armenia
    australia austria azerbaijan bahrain bangladesh belarus belgium bolivia bosnia botswana brazil brunei bulgaria
    burundi cambodia cameroon canada chile china colombia congo croatia cuba cyprus denmark ecuador egypt england
    eritrea estonia ethiopia fiji finland france gabon gambia georgia germany ghana greece guatemala guinea guyana
    haiti honduras hungary iceland india indonesia iran iraq ireland israel italy jamaica japan jordan kazakhstan
    kenya kosovo kuwait laos latvia lebanon lesotho liberia libya lithuania luxembourg madagascar malawi malaysia
    maldives mali malta mauritius mexico moldova monaco mongolia montenegro morocco mozambique myanmar namibia nepal
    nicaragua niger nigeria norway oman pakistan palestine panama paraguay peru philippines poland portugal qatar
    romania russia rwanda scotland senegal serbia singapore slovakia slovenia somalia spain sudan sweden switzerland
    syria taiwan tajikistan tanzania thailand tibet togo tunisia turkmenistan uganda ukraine uruguay uzbekistan
    venezuela vietnam wales yemen zambia zimbabwe europe africa asia antarctica alabama alaska arizona arkansas
    california colorado connecticut delaware florida hawaii idaho illinois indiana iowa kansas kentucky louisiana
    maine maryland massachusetts michigan minnesota mississippi missouri montana nebraska nevada ohio oklahoma
    oregon pennsylvania tennessee texas utah vermont virginia wisconsin wyoming carolina dakota american british
    english french german spanish italian portuguese dutch russian chinese mandarin cantonese japanese korean arabic
    hindi urdu bengali punjabi tamil telugu turkish greek polish czech hungarian swedish norwegian danish finnish
    hebrew persian farsi thai vietnamese indonesian malay swahili latin irish scottish welsh canadian australian
    indian mexican brazilian african european asian london paris berlin madrid rome milan vienna prague budapest
    warsaw moscow kyiv kiev istanbul athens lisbon barcelona amsterdam brussels dublin edinburgh glasgow manchester
    liverpool birmingham zurich geneva munich hamburg frankfurt cologne copenhagen oslo stockholm helsinki tokyo
    osaka kyoto seoul beijing shanghai shenzhen guangzhou bangkok hanoi jakarta manila mumbai delhi bangalore
    bengaluru chennai kolkata hyderabad pune karachi lahore islamabad dhaka dubai doha riyadh jeddah tehran baghdad
    cairo lagos nairobi johannesburg casablanca sydney melbourne brisbane perth auckland wellington toronto
    vancouver montreal ottawa boston chicago dallas houston austin denver seattle portland phoenix miami atlanta
    philadelphia detroit washington orlando vegas baltimore cleveland minneapolis milwaukee memphis nashville
    charlotte tampa sacramento oakland havana bogota lima santiago caracas google apple microsoft amazon facebook
    meta tesla netflix nvidia intel amd ibm oracle samsung sony toyota honda ford bmw audi mercedes volkswagen
    hyundai nissan chevrolet uber lyft airbnb paypal visa mastercard amex twitter instagram tiktok snapchat telegram
    linkedin reddit quora spotify youtube whatsapp gmail yahoo bing outlook starbucks walmart costco ikea nike
    adidas python java javascript typescript rust golang ruby php perl scala kotlin swift haskell fortran cobol
    matlab sql html css bash mysql sqlite mongodb redis kafka docker kubernetes terraform ansible jenkins git github
    gitlab linux ubuntu debian fedora windows macos android ios iphone ipad macbook chrome firefox safari django
    flask fastapi react angular vue nodejs numpy pandas pytorch tensorflow excel powerpoint aws azure gcp chatgpt
    openai claude gemini llama mistral bitcoin ethereum dogecoin aspirin ibuprofen paracetamol acetaminophen
    naproxen metformin insulin warfarin heparin amoxicillin penicillin prednisone prednisolone lisinopril losartan
    atorvastatin simvastatin omeprazole sertraline fluoxetine citalopram escitalopram adderall ritalin xanax valium
    viagra cialis morphine codeine tramadol christianity islam hinduism buddhism judaism jesus muhammad buddha obama
    trump biden clinton bush putin hitler stalin napoleon einstein newton shakespeare hinduism christian muslim
    jewish hindu buddhist catholic protestant mercury venus mars jupiter saturn uranus neptune pluto nba nfl mlb nhl
    fifa uefa nasa fbi cia irs who un nato eu
"""

# Plain words when written small.
PLAIN_WORDS_TOO = words(
    "who apple windows bush ford swift rust excel oracle meta visa java charlotte phoenix austin chrome outlook "
    "safari mercury newton turkey polish jordan chile mali guinea china oman reading nice bing un perth lima "
    "wellington portland git ios amd"
)  # fmt: skip

NAMES: dict[str, str] = {
    name: name for name in _NAMES.split() if name not in PLAIN_WORDS_TOO or name in {"visa", "java", "windows"}
}
NAMES |= {form: row.split()[0] for row in _ONE_NAME.strip().splitlines() for form in row.split()}

# Abbreviations that are plain nouns of everyday language: capitals say nothing.
COMMON_ABBREVIATIONS = words(
    "atm pin id tv pc ok faq asap usb wifi gps cv hr ceo diy pdf url dvd cd fyi btw lol rsvp eta vip dob otp sms app "
    "q&a i ii"
)

# Written in capitals these are names, in small letters everyday words.
CAPITAL_NAMES: dict[str, str] = {
    "US": "usa",
    "USA": "usa",
    "IT": "it department",
    "WHO": "world health organization",
    "UN": "united nations",
}
