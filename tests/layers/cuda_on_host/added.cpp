#define STRETTO_ON_HOST
#include "wide_device.h"

#include "added.cu"
