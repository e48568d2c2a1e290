#define STRETTO_ON_HOST
#include "device.h"

#include "several.cu"
