from hypothesis import settings

# Machines that run tests are busy; a slow example is not a failure. Time limits are in the tests that are about time.
settings.register_profile("unit", deadline=None, print_blob=True)
settings.load_profile("unit")
