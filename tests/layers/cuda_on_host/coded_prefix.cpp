#define STRETTO_ON_HOST
#include "attention_device.h"

#include "coded_prefix.cu"
