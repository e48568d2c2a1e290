#define STRETTO_ON_HOST
#include "suffix_device.h"

#include "suffix.cu"
